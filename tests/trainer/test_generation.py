"""`python -m dhp generate`, from a run's checkpoint in other layouts than its own and from a model's directory."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dhp.__main__ import main
from dhp.cli.generate import answer_line
from dhp.observe.metrics import AnswerMetrics
from tests.helpers.runs import ONE_ACTOR_EACH, Outcome, tiny, train

PROMPT = "Which shape is this?"
NEW = 6


def plainly(model: Path, image: Path, question: str = PROMPT) -> str:
    """What plain transformers answers, by the lines that docs/checkpoints.md shows."""
    page = (Path(__file__).parents[2] / "docs/checkpoints.md").read_text()
    (lines,) = [one for one in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "generate(" in one]
    # The number first: paths that are put in may have it in them.
    own = {"128": NEW, "exported/qwen3b": model, "receipt.png": image, "What is on the receipt?": question}
    for shown, here in own.items():
        assert lines.count(shown) == 1, shown
        lines = lines.replace(shown, str(here))
    names: dict[str, Any] = {}
    exec(lines, names)
    return str(names["tokenizer"].decode(names["answer"], skip_special_tokens=True))


def generated(out: Path, *arguments: str) -> str:
    ended = train("generate", f"prompt={PROMPT}", f"max_new_tokens={NEW}", f"out={out}", *arguments, module="dhp")
    assert ended.status == 0 and ended.left == (), ended.stderr
    told = json.loads(out.read_text())
    assert told["text"] in ended.stdout and 1 <= len(told["token_ids"]) <= NEW
    return str(told["text"])


@pytest.mark.slow
def test_a_runs_checkpoint_answers_in_another_layout(
    first_run: tuple[Path, Outcome], tiny_assets: Path, tmp_path: Path
) -> None:
    image = tiny_assets / "data" / "images" / "00000_0.png"
    run_dir, _ = first_run
    assert main(["export", str(run_dir), str(tmp_path / "exported")]) == 0
    wanted = plainly(tmp_path / "exported", image)
    given = [f"checkpoint={run_dir}", f"images=[{image}]"]
    assert generated(tmp_path / "new" / "a.json", *given, "text.parallelism=sequence", "text.ring=2") == wanted
    exported = [f"checkpoint={tmp_path / 'exported'}", f"images={image}", "--config-name=tiny", *ONE_ACTOR_EACH]
    assert generated(tmp_path / "b.json", *exported) == wanted


@pytest.mark.slow
def test_a_run_answers_with_its_evaluations_and_its_adapters_answer_afterwards(
    tiny_assets: Path, tmp_path: Path
) -> None:
    run_dir, image = tmp_path / "run", tiny_assets / "data" / "images" / "00000_0.png"
    asked = ["data.eval_datasets=['shapes%10']", "training.eval_answers=2", "training.eval_answer_tokens=4"]
    own = ["text.lora.rank=4", "training.frozen=[vision]", "training.max_steps=2", "training.learning_rate=0.01"]
    ended = train(*tiny(tiny_assets, run_dir, *ONE_ACTOR_EACH, *asked, *own))
    assert ended.status == 0, ended.stderr
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    told = [line for line in lines if line["kind"] == "answer"]
    assert [(line["step"], line["dataset"], line["number"]) for line in told] == [(2, "shapes", 1), (2, "shapes", 2)]
    assert all(line["prompt"] and line["reference"] and 1 <= line["tokens"] <= 4 for line in told)
    assert f"answer 1 of shapes after step 2: {json.dumps(told[0]['prompt'])}" in ended.stderr
    assert b"answer/shapes/1" in b"".join(file.read_bytes() for file in (run_dir / "tb").iterdir())
    assert main(["export", str(run_dir), str(tmp_path / "exported")]) == 0
    given = [f"checkpoint={run_dir}", f"images=[{image}]"]
    assert generated(tmp_path / "a.json", *given) == plainly(tmp_path / "exported", image)


def test_a_dataset_is_answered_after_one_start(tiny_assets: Path, tmp_path: Path) -> None:
    model, rows = tiny_assets / "model", json.loads((tiny_assets / "data" / "annotations.json").read_text())
    shown = [row for row in rows if "image" in row][:3]
    (tmp_path / "rows.json").write_text(json.dumps(shown))
    (question, answer) = (shown[0]["conversations"][at]["value"] for at in (0, 1))
    entry = f"{{annotation_path: {tmp_path / 'rows.json'}, data_path: {tiny_assets / 'data'}}}"
    given = [f"checkpoint={model}", "--config-name=tiny", *ONE_ACTOR_EACH, f"data.data_registry.own={entry}"]
    out = tmp_path / "new" / "answers.jsonl"
    ended = train("generate", "dataset=own", f"max_new_tokens={NEW}", f"out={out}", *given, module="dhp")
    assert ended.status == 0 and ended.left == (), ended.stderr
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["number"] for line in lines] == [1, 2, 3] and lines[0]["reference"] == answer
    image = tiny_assets / "data" / shown[0]["image"]
    assert lines[0]["answer"] == plainly(model, image, question.replace("<image>", "").strip())
    exact = sum(line["exact"] for line in lines)
    assert f"own: {exact} of 3 answers are exact" in ended.stdout


def test_an_exact_answer_may_differ_in_white_space_around_it() -> None:
    found = AnswerMetrics(step=1, dataset="a", number=2, prompt="p", reference=" A red square.", answer="", tokens=3)
    lines = [
        answer_line(replace(found, answer=said)) for said in ("A red square.\n", "A red  square.", "a red square.")
    ]
    assert [line["exact"] for line in lines] == [True, False, False]
    told = {"number": 2, "prompt": "p", "reference": " A red square.", "answer": "A red square.\n", "tokens": 3}
    assert lines[0] == told | {"exact": True}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["dataset=shape", "out=x.jsonl", "checkpoint={run}"], "shape is not in data.data_registry"),
        (["dataset=shapes", "out=x.jsonl", "checkpoint={run}", "--benchmark"], "--benchmark answers one prompt"),
        (["prompt=x", "checkpoint={model}"], "is a model: name a FILE.yaml or --config-name=NAME"),
        (["prompt=x"], "checkpoint= is not given: name a FILE.yaml or --config-name=NAME"),
        (["prompt=x", "checkpoint=nowhere"], "nowhere is no directory"),
        (["prompt=x", "checkpoint={run}", "text.parallelism=pipeline"], "text.pipeline=2"),
        (["prompt=x", "checkpoint={run}", "text.num_actors=3"], "tensor=3 cannot split"),
        (
            [
                "prompt=x",
                "checkpoint={run}",
                "--config-name=tiny",
                "text.model_name={model}",
                "vision.model_name={model}",
            ],
            "is of another model",
        ),
        (["prompt=x", "checkpoint={run}", "text.lora.rank=3"], "had other adapters"),
        (["prompt=x", "checkpoint={run}", "max_new_tokens=99999"], "99999 new ones are more than the"),
        (["images=[nowhere.png]", "checkpoint={run}"], "nowhere.png does not exist"),
        (["images=[{run}/config.yaml]", "checkpoint={run}"], "config.yaml cannot be decoded"),
        (["videos=[{run}/config.yaml]", "checkpoint={run}"], "config.yaml"),
        (["prompt=a <|image_pad|>", "checkpoint={run}"], "1 image placeholder tokens for 0 images"),
        (["prompt=x", "checkpoint={run}", "out={run}"], "is a directory; name a file in it"),
        (["prompt=x", "checkpoint={run}", "out={run}/config.yaml/a"], "config.yaml is no directory that takes files"),
    ],
)
def test_what_cannot_be_answered_is_refused_before_anything_starts(
    arguments: list[str],
    told: str,
    first_run: tuple[Path, Outcome],
    made_model: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run_dir, _ = first_run
    given = [one.format(model=made_model, run=run_dir) for one in arguments]
    assert main(["generate", *given]) == 1
    ended = capsys.readouterr()
    assert told in ended.err and "starting Ray" not in ended.out + ended.err
