"""`dhp experiments list | run NAME|all [--quick] [arguments …] | index`: what the documents' figures are from."""

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from dhp.cli.common import make_parser
from dhp.core.errors import ConfigError

CHECKOUT = Path(__file__).parents[2]  # where dhp is run from its sources


def main(arguments: Sequence[str]) -> int:
    """experiments list: every experiment, about how long it takes, and which rows results/ has of it.

    experiments run NAME: run it and show its lines; then one sentence with the spread and the published figure beside
    it. Rows go to results/NAME.jsonl with the machine, its load and the date, a picture to results/NAME.png. It is
    not judged where the load is above the cores. With --quick, with arguments of the experiment's own behind its name
    and on a busy machine, rows go to results/tried/ instead. experiments run all --quick: all that have a short run.

    experiments index: write the sentences of all rows in results/ into experiments/EXPERIMENTS.md."""
    read_arguments(arguments)
    if not (CHECKOUT / "experiments" / "registry.py").is_file():
        raise ConfigError(
            f"there are no experiments beside {CHECKOUT / 'dhp'}: they belong to dhp's sources, and an installed "
            "package has none. Run this command in a checkout of the repository"
        )
    paths = [str(CHECKOUT), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    return subprocess.call([sys.executable, "-m", "experiments", *arguments], cwd=CHECKOUT, env=environment)


def read_arguments(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """What is asked, and the experiment's own arguments behind its name."""
    parser = make_parser("experiments", main.__doc__)
    uses = parser.add_subparsers(dest="what", required=True)
    uses.add_parser("list", help="every experiment", allow_abbrev=False)
    run = uses.add_parser("run", help="one of them, or all that have a short run", allow_abbrev=False)
    run.add_argument("name", metavar="NAME", help="of the list, or all; further arguments are the experiment's own")
    run.add_argument("--quick", action="store_true", help="a short run: less work, fewer rounds")
    uses.add_parser("index", help="write the sentences of results/ into EXPERIMENTS.md", allow_abbrev=False)
    asked, more = parser.parse_known_args(arguments)
    if more and asked.what != "run":
        parser.error(f"{asked.what} takes no arguments: {' '.join(more)}")
    return asked, more
