"""`dhp COMMAND …`, also as `python -m dhp COMMAND …`."""

import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from dhp.cli.completion import COMMANDS, usage
from dhp.core.errors import DhpError
from dhp.core.process import INTERRUPTED, outlive_readers
from dhp.core.text import did_you_mean, harmless, nearest, shell_command
from dhp.version import VERSION


def main(arguments: Sequence[str]) -> int:
    """Run one command; its exit status."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        return 0 if arguments else 2
    name, *rest = arguments
    if name == "--version":
        print(VERSION)
        return 0
    if name not in COMMANDS:
        hint = did_you_mean([nearest(name, COMMANDS)])
        more = f" {' '.join(shell_command())} --help lists all" if hint else f"\n\n{usage()}"
        print(f"{name} is no command of dhp{hint}{more}", file=sys.stderr)
        return 2
    if name == "train":
        from dhp.train_ray import start

        start(rest)  # which ends the process where there is a status to tell
        return 0
    command: Callable[[Sequence[str]], int] = import_module(f"dhp.cli.{name}").main
    try:
        return command(rest)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except (DhpError, OSError) as error:  # an OSError names the file
        print(f"{type(error).__name__}: {harmless(str(error))}", file=sys.stderr)
        return 1


def run() -> int:
    """The console command `dhp`."""
    outlive_readers()
    return main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(run())
