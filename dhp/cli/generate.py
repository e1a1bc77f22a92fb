"""`python -m dhp generate --config-name=NAME checkpoint=… prompt=… …`: the answer of a model in any layout."""

import argparse
import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from dhp.cli.common import add_configuration, logs_folder, make_parser, read_configuration
from dhp.config.generate_request import GenerateRequest, answering, laid_out_anew, read_request
from dhp.config.schema import Config
from dhp.core.errors import ConfigError
from dhp.core.process import StartUp, heed, interruptible
from dhp.core.text import harmless
from dhp.observe.metrics import AnswerMetrics


def main(arguments: Sequence[str]) -> int:
    """generate: answer one prompt, which may show images and videos, or all prompts of a dataset.

    checkpoint= is a run's directory (its newest checkpoint, or `checkpoints/best`), a checkpoint, or the directory of a
    Hugging Face model. A run's own config.yaml says the layout; for a model, name a FILE.yaml or --config-name.
    key=value changes either. The prompt is one turn of a user, images and videos first, as the model's chat template
    writes it. dataset=NAME out=answers.jsonl asks every sample of a dataset, after one start, and writes a line each:
    prompt, reference, answer, whether the two are the same."""
    own = ", ".join(f"{one.name}=" for one in fields(GenerateRequest))
    parser = make_parser("generate", main.__doc__)
    parser.add_argument("--benchmark", action="store_true", help="answer several times; tell seconds and bytes as JSON")
    add_configuration(parser, f"{own} FILE.yaml, overrides")
    given = parser.parse_intermixed_args(arguments)
    heed()
    request, settings = read_request(given.settings)
    if request.dataset and given.benchmark:
        raise ConfigError("--benchmark answers one prompt several times; give it prompt=TEXT in the place of dataset=")
    out = _new_file(request.out)
    config, checkpoint = _configuration(request, given, settings)
    if request.dataset and out is not None:
        print(_answer_all(config, checkpoint, request, out), flush=True)
        return 0
    from dhp.trainer.generation import ROUNDS, generate

    with interruptible(), logs_folder("dhp-generate-") as logs:
        say, rounds = StartUp(time.perf_counter()), ROUNDS if given.benchmark else 0
        found = generate(replace(config, run_dir=str(logs)), checkpoint, request, say, rounds)
    answer: Mapping[str, Any] = {"token_ids": list(found.token_ids), "text": found.text}
    print(json.dumps(asdict(found.figures)) if given.benchmark else harmless(found.text), flush=True)
    if out is not None:  # last: with a full disk, the answer is printed already
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(answer, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0


def _answer_all(config: Config, checkpoint: Path | None, request: GenerateRequest, out: Path) -> str:
    """Write a line an answer, each as soon as it is there; how many are exact, in words."""
    from dhp.trainer.generation import generate_all  # it imports torch and Ray

    exact = count = 0
    out.parent.mkdir(parents=True, exist_ok=True)
    with interruptible(), logs_folder("dhp-generate-") as logs, ExitStack() as opened:
        answers = generate_all(replace(config, run_dir=str(logs)), checkpoint, request, StartUp(time.perf_counter()))
        with closing(answers):
            for found in answers:
                if not count:  # only now: what is refused leaves the file of an earlier command as it was
                    file = opened.enter_context(out.open("w", encoding="utf-8"))
                line = answer_line(found)
                exact, count = exact + line["exact"], count + 1
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
                file.flush()
    return f"{request.dataset}: {exact:,} of {count:,} answers are exact ({exact / count:.1%}); all are in {out}"


def answer_line(found: AnswerMetrics) -> dict[str, Any]:
    """An answer as a line of the file. exact: it is the reference, but for white space around the two."""
    line = {key: getattr(found, key) for key in ("number", "prompt", "reference", "answer", "tokens")}
    return line | {"exact": found.answer.strip() == found.reference.strip()}


def _configuration(
    request: GenerateRequest, given: argparse.Namespace, settings: Sequence[str]
) -> tuple[Config, Path | None]:
    """The configuration that answers, and the checkpoint; None: the model's own weights. Raises DhpError."""
    path = Path(request.checkpoint).expanduser() if request.checkpoint else None
    what = f"{request.checkpoint} is a model" if request.checkpoint else "checkpoint= is not given"
    missing = f"{what}: name a FILE.yaml or --config-name=NAME for the layout"
    config, checkpoint = read_configuration(path, given, settings, missing, laid_out_anew)
    return answering(config, request.dataset), checkpoint


def _new_file(out: str) -> Path | None:
    """The file for the answer. Raises ConfigError for a directory, and for a place that cannot be written."""
    if not out:
        return None
    path = Path(out).expanduser()
    if path.is_dir():
        raise ConfigError(f"out={out} is a directory; name a file in it, as {path / 'answer.json'}")
    there = next(parent for parent in path.absolute().parents if parent.exists())
    if not there.is_dir() or not os.access(there, os.W_OK) or (path.exists() and not os.access(path, os.W_OK)):
        raise ConfigError(f"out={out} cannot be written: {there} is no directory that takes files. Choose another")
    return path
