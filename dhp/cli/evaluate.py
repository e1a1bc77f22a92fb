"""`python -m dhp evaluate loss|needle RUN_OR_MODEL …`: evaluates a checkpoint or a model."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace

from dhp.cli.common import add_options, find_configuration, logs_folder, make_parser
from dhp.cli.needle import needle
from dhp.config.suggestions import did_you_mean, nearest
from dhp.core.command import own_command
from dhp.core.errors import ConfigError
from dhp.core.process import StartUp, heed, interruptible, say_nothing
from dhp.observe.metrics import EvalMetrics

EXCHANGE = "exchange"  # a setting of the command alone


def main(arguments: Sequence[str]) -> int:
    """Run one of the evaluations; its exit status."""
    if not arguments or arguments[0] not in EVALUATIONS:
        what = arguments[0] if arguments else ""
        asked = what in ("-h", "--help")
        error = "" if asked or not what else f"{what} is no evaluation{did_you_mean([nearest(what, EVALUATIONS)])}\n"
        called = " ".join(own_command("evaluate"))
        usage = f"{error}usage: {called} {'|'.join(EVALUATIONS)} PATH … (each has --help)"
        print(usage, file=sys.stdout if asked else sys.stderr)
        return 0 if asked else 2
    return EVALUATIONS[arguments[0]](arguments[1:])


def loss(arguments: Sequence[str]) -> int:
    """evaluate loss: measure the loss of data.eval_datasets, without training.

    PATH is a run's directory (its newest checkpoint, or `checkpoints/best`), a checkpoint, or the directory of a
    Hugging Face model. A run's own config.yaml says the layout and the data; for a model, name a FILE.yaml or
    --config-name. key=value changes either, as data.eval_datasets=[NAME].

    exchange=images measures it twice: as the samples are, and each with the images of another one. A model that looks
    at images loses by that; only samples are counted that show images, and for which another one shows as many others.
    """
    parser = make_parser("evaluate loss", loss.__doc__)
    parser.add_argument("--json", action="store_true", help="a JSON object a dataset, on stdout alone")
    add_options(parser)
    given = parser.parse_intermixed_args(arguments)
    heed()
    exchange, given.settings = _split_exchange(given.settings)
    config, checkpoint = find_configuration(given)
    say = say_nothing if given.json else StartUp(time.perf_counter())
    from dhp.trainer.evaluation import evaluate, evaluate_exchanged  # it imports torch and Ray

    with interruptible(), logs_folder("dhp-evaluate-") as logs:
        asked = (replace(config, run_dir=str(logs)), checkpoint, say)
        found = evaluate_exchanged(*asked) if exchange else {"": evaluate(*asked)}
    for images, lines in found.items():
        for metrics in lines:
            row = asdict(metrics) | ({"images": images} if images else {})
            print(json.dumps(row) if given.json else _line(metrics, images))
    return 0


def _split_exchange(settings: Sequence[str]) -> tuple[bool, list[str]]:
    """Whether images are exchanged, and the other settings. Raises ConfigError for anything else to exchange."""
    rest = [one for one in settings if one.partition("=")[0] != EXCHANGE]
    for one in settings:
        if one not in (*rest, f"{EXCHANGE}=images"):
            raise ConfigError(f"{one}: images alone can be exchanged; write {EXCHANGE}=images")
    return len(rest) < len(settings), rest


def _line(metrics: EvalMetrics, images: str) -> str:
    """images: whose images the samples had; "": nothing is said of it."""
    shown = f"{metrics.dataset or 'all together':16} " + (f"{images + ' images':14} " if images else "")
    if metrics.loss is not None:
        shown += f"loss {metrics.loss:.4f}  accuracy {metrics.accuracy:.1%}"
    counted = f"{metrics.target_tokens:,} target tokens  {metrics.samples:,} samples  {metrics.seconds:.1f} s"
    return f"{shown}  {counted}"


EVALUATIONS: dict[str, Callable[[Sequence[str]], int]] = {"loss": loss, "needle": needle}
