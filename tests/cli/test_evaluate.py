"""`evaluate` and `generate` of runs of every kind."""

from __future__ import annotations

import argparse
import json
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from dhp.__main__ import main
from dhp.cli.common import add_options, find_configuration
from dhp.cli.evaluate import NAME, _hide, _reading
from dhp.cli.generate import _configuration
from dhp.config.command_line import compose_config, to_yaml
from dhp.config.data import LimitsConfig
from dhp.config.generate_request import GenerateRequest
from dhp.config.resolve import resolve
from dhp.config.schema import Config
from dhp.core.reports import EvaluatedShare
from dhp.trainer.evaluation import Evaluation, _Done
from dhp.trainer.preflight import prepare
from tests.helpers.graphs import make_graph
from tests.helpers.rows import slow_but
from tests.helpers.runs import train


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--frames", "8,3"], "--frames 3: two frames are a step in time; take even numbers from 4 on"),
        (["--frames", "7"], "--frames 7: two frames"),
        (["--depths", "0,1.5"], "--depths 1.5: 0 is a video's beginning and 1 its end"),
        (["--needles", "0"], "--needles 0: at least one video"),
        (["--image", "a.png"], "--image, --question and --answer make a needle together"),
        (["--haystack", "v.mp4"], "--haystack without --image"),
    ],
)
def test_what_cannot_be_asked_is_refused(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "needle", "somewhere", *arguments]) == 1
    assert told in capsys.readouterr().err


def test_an_evaluation_that_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "needel", "x"]) == 2
    assert "needel is no evaluation; did you mean needle?" in capsys.readouterr().err
    assert main(["evaluate", "--help"]) == 0


def test_every_cell_has_needles_of_several_colours() -> None:
    given = Namespace(depths=(0.0, 1.0), frames=(8, 16), needles=3, image=None, seed=0)
    hidden = _hide(given)
    assert [(one.depth, one.frames) for one in hidden[::3]] == [(0.0, 8), (0.0, 16), (1.0, 8), (1.0, 16)]
    assert len({one.needle.answer for one in hidden[:3]}) == 3
    assert len({one.seed for one in hidden}) == len(hidden)


def test_a_sample_is_found_where_all_of_its_targets_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two replicas, whose two ranks share a row; the last batch has a sample for one of them alone."""
    evaluation = Evaluation.__new__(Evaluation)
    evaluation._graph = make_graph(text=_degrees())
    evaluation._datasets = [None]  # type: ignore[list-item]
    share = lambda right, targets: EvaluatedShare(0.0, right, targets)
    batches: list[Any] = [
        _Done(None, (share(1, 1), share(2, 2), share(2, 2), share(0, 1))),  # type: ignore[arg-type]
        _Done(None, (share(0, 0), share(3, 3), share(0, 0), share(0, 0))),  # type: ignore[arg-type]
    ]
    monkeypatch.setattr(Evaluation, "_batches", lambda self, data: batches)
    assert evaluation.each() == [True, False, True]


def _degrees() -> Any:
    from dhp.core.axes import Degrees

    return Degrees(data=2, ring=2)


@pytest.mark.slow
def test_a_model_that_knows_nothing_finds_nothing(tmp_path: Path, tiny_assets: Path) -> None:
    Image.new("RGB", (56, 56), (250, 10, 10)).save(tmp_path / "red.png")
    own = ["--image", str(tmp_path / "red.png"), "--question", "Which?", "--answer", "red"]
    outcome = train(
        *("evaluate", "needle", str(tiny_assets / "model"), "--config-name=tiny", f"--out={tmp_path / 'out'}"),
        *("--frames=4,300", "--depths=0,1", "--needles=1", *own),
        *("text.parallelism=sequence", "data.video_whole_frames=64"),
        module="dhp",
    )
    assert outcome.status == 0, outcome.stderr
    told = json.loads((tmp_path / "out" / "needle.json").read_text())
    assert told == {
        "model": str(tiny_assets / "model"),
        "frames": [4, 300],
        "depths": [0.0, 1.0],
        "needles": 1,
        "found": [[0.0, 0.0], [0.0, 0.0]],
    }
    with Image.open(tmp_path / "out" / "needle.png") as drawn:
        assert drawn.width > 200


ONE_TEXT = ("text.parallelism=none", "text.num_actors=1")
FROZEN = ("training.frozen=[vision,projector]", "vision.zero_stage=0")
FSDP = ("text.zero_stage=3", "text.zero_engine=fsdp")
KINDS: dict[str, tuple[str, ...]] = {
    "limits of balanced": ("data.balance=balanced", "data.limits.text=200", "training.schedule=vision_ahead"),
    "all limits": (
        *("data.balance=isf", "data.limits.text=200", "data.limits.vision=300", "data.limits.full_text=50"),
        *("data.limits.full_vision=90", "training.groups.projector={{learning_rate: 0.1, warmup_steps: 1}}"),
    ),
    "long tokens": (
        "data.balance=balanced",
        "data.long_tokens=80",
        "data.max_tokens=4000",
        "text.compile=true",
        *ONE_TEXT,
    ),
    "a window": ("data.balance=isf", "data.balance_window=64", "training.max_steps=9", "text.parallelism=autotp"),
    "like lengths, padded": ("data.packing=false", "data.balance=length_group", "training.num_epochs=2"),
    "kept features": ("data.cache_features={folder}/features", "data.cache_features_gib=1", *FROZEN),
    "evaluated": (
        *("training.eval_answers=2", "data.eval_datasets=[shapes]", "training.best_metric=eval_loss/shapes"),
        *("training.save_steps=2", "training.loggers=[wandb]", "training.logger_project=mine"),
    ),
    "planned recomputing": ("text.recompute=auto", "memory.budget_gib=1", "data.shuffle=false"),
    "interleaved": (
        *("text.parallelism=pipeline", "text.virtual_stages=2", "training.schedule=interleaved"),
        *("training.batch_size=8", "training.micro_batch_size=1"),
    ),
    "1f1b": ("text.parallelism=pipeline", "text.cuts=[1]", "training.schedule=1f1b"),
    "deepspeed": ("text.parallelism=deepspeed", "text.zero_stage=3", "vision.parallelism=deepspeed"),
    "a shared row by FSDP2": ("text.parallelism=sequence", *FSDP),
    "12 bytes of states": ("text.parallelism=sequence", "text.dtype=bfloat16", "text.state_bytes=12", *FSDP),
    "adapters": ("text.lora.rank=2", "text.lora.dropout=0.1", "training.resume=auto", "data.on_bad_sample=skip"),
}
QUICK = ("all limits", "kept features", "evaluated", "interleaved", "a shared row by FSDP2", "adapters")
LAID_OUT = {"interleaved": ONE_TEXT, "1f1b": ONE_TEXT}  # a pipeline cannot answer, as generate says


@pytest.mark.parametrize("kind", slow_but(KINDS, *QUICK))
def test_any_run_is_evaluated_and_asked(kind: str, tmp_path: Path, tiny_assets: Path) -> None:
    run_dir = tmp_path / "run"
    checkpoint = run_dir / "checkpoints" / "step_1"
    checkpoint.mkdir(parents=True)
    (checkpoint / "checkpoint.json").write_text(json.dumps({"step": 1}))
    own = [setting.format(folder=tmp_path) for setting in KINDS[kind]]
    trained = resolve(compose_config("tiny", overrides=[f"tiny_assets={tiny_assets}", f"run_dir={run_dir}", *own]))
    (run_dir / "config.yaml").write_text(to_yaml(trained))

    loss, found = find_configuration(options(run_dir, ["data.eval_datasets=[shapes]"]))
    assert found is not None
    of_plain_rows(prepare(loss, new_run=False))

    (tmp_path / "a.jsonl").write_text("")
    needle, _ = find_configuration(options(run_dir, []), [NAME])
    of_plain_rows(prepare(_reading(needle, tmp_path / "a.jsonl", 16), new_run=False))

    request = GenerateRequest(prompt="a", checkpoint=str(run_dir))
    given = argparse.Namespace(config_name=None, config_path=None)
    asked, found = _configuration(request, given, LAID_OUT.get(kind, ()))
    assert found is not None
    of_plain_rows(prepare(asked, new_run=False, reads=False))


def options(run_dir: Path, settings: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_options(parser)
    return parser.parse_args([str(run_dir), *settings])


def of_plain_rows(config: Config) -> None:
    assert (config.data.balance, config.data.balance_window, config.data.long_tokens) == ("random", None, None)
    assert config.data.limits == LimitsConfig()
