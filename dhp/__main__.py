"""`python -m dhp COMMAND …`: the commands beside training."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from dhp.config.suggestions import did_you_mean, nearest
from dhp.core.errors import DhpError
from dhp.core.process import INTERRUPTED
from dhp.core.text import harmless

COMMANDS = {
    "doctor": "model PATH [--json]: whether a model can be trained, and in which layouts, by its config.json alone\n"
    f"{'':11}machine [--json]: versions, GPUs, and which optional packages are here and usable",
    "evaluate": "loss RUN_OR_MODEL [key=value …]: the loss on held-out datasets, without training\n"
    f"{'':11}needle RUN_OR_MODEL [--frames N,N]: where in videos a model finds what they hide, as a heat map",
    "export": "RUN_OR_CHECKPOINT OUT_DIR: write a checkpoint as an ordinary Hugging Face directory",
    "generate": "--config-name=NAME checkpoint=RUN_OR_MODEL prompt=TEXT images=[…] videos=[…] out=FILE.json: an answer",
    "inspect": "batch --config-name=NAME step=K out=FILE.safetensors: the tensors of a step as the model gets them\n"
    f"{'':11}sample --config-name=NAME index=K: its prompt, what of it is learned, lengths, pictures\n"
    f"{'':11}data --config-name=NAME: counts, lengths, defects, and the balancing methods side by side\n"
    f"{'':11}checkpoint RUN_OR_CHECKPOINT [--verify]: what it holds, and whether every byte is as it was written",
    "report": "RUN [RUN …] [--out FILE.html] [--png DIR]: what bounds a run, where its time went, what it learned",
    "plan": "--config-name=NAME [devices=8x8 device=h100]: the fastest layouts that fit, and why others lose, offline",
}


def main(arguments: Sequence[str]) -> int:
    """Run one command; its exit status."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage())
        return 0 if arguments else 2
    name, *rest = arguments
    if name == "train":
        print(f"training is `python -m dhp.train_ray {' '.join(rest) or 'FILE.yaml'}`", file=sys.stderr)
        return 2
    if name not in COMMANDS:
        print(f"{name} is no command of dhp{did_you_mean([nearest(name, COMMANDS)])}\n\n{_usage()}", file=sys.stderr)
        return 2
    command: Callable[[Sequence[str]], int] = import_module(f"dhp.cli.{name}").main
    try:
        return command(rest)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except (DhpError, OSError) as error:  # an OSError names the file
        print(f"{type(error).__name__}: {harmless(str(error))}", file=sys.stderr)
        return 1


def _usage() -> str:
    lines = [f"  {name:8} {text}" for name, text in COMMANDS.items()]
    training = "Training: python -m dhp.train_ray FILE.yaml|--config-name=NAME"
    return "\n".join(["usage: python -m dhp COMMAND …", *lines, training])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
