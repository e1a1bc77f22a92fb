"""The loop: steps, and those whose numbers are faulty."""

import json
import math
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from dhp.__main__ import main as dhp
from dhp.core.reports import StageReport
from dhp.observe.metrics import EvalMetrics, StepMetrics
from dhp.trainer.trainer import NAMED, NonfiniteCount, count_before, last_line, line, listed
from tests.helpers.runs import processes_of, tiny, train, wait_for_steps
from tests.helpers.sockets import LOOPBACK, listening_addresses

ONE_ACTOR_EACH = [
    *("vision.parallelism=none", "vision.num_actors=1", "vision.zero_stage=0"),
    *("text.parallelism=none", "text.num_actors=1"),
]
CONSTANT_RATE = ["training.warmup_steps=0"]


@pytest.fixture
def first_picture_missing(tmp_path: Path, tiny_assets: Path) -> list[str]:
    """One sample a step, in order, of which the first cannot be read."""
    samples = json.loads((tiny_assets / "data" / "annotations.json").read_text())
    with_picture = [sample for sample in samples if isinstance(sample.get("image"), str)][:3]
    with_picture[0]["image"] = "nowhere.png"
    annotations = tmp_path / "annotations.json"
    annotations.write_text(json.dumps(with_picture))
    return [
        f"data.data_registry.shapes.annotation_path={annotations}",
        "data.shuffle=false",
        "data.on_bad_sample=skip",
        "training.batch_size=1",
        "training.micro_batch_size=1",
        "training.max_steps=3",
    ]


def lines_of(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def summary(run_dir: Path) -> dict:
    return json.loads((run_dir / "summary.json").read_text())


def plain_loss(model_dir: Path, batch_file: Path) -> float:
    """Mean token loss of the untrained model on the only row of a batch of `inspect`."""
    batch = {key.rpartition("/")[2]: tensor for key, tensor in load_file(batch_file).items()}
    labels = batch.pop("labels")[0, 1:]
    with torch.no_grad():
        logits = AutoModelForImageTextToText.from_pretrained(model_dir)(**batch, use_cache=False).logits[0, :-1]
    return float(torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100))


def test_a_step_without_any_sample_leaves_the_model_as_it_was(
    tiny_assets: Path, tmp_path: Path, first_picture_missing: list[str]
) -> None:
    run_dir, overrides = tmp_path / "run", [*ONE_ACTOR_EACH, *CONSTANT_RATE, *first_picture_missing]
    outcome = train(*tiny(tiny_assets, run_dir, *overrides))
    assert outcome.status == 0, outcome.stderr
    assert outcome.left == ()
    empty, second, third = lines_of(run_dir)
    assert (empty["loss"], empty["grad_norm"], empty["tokens"], empty["target_tokens"]) == (None, 0.0, 0, 0)
    assert [line["samples"] for line in (empty, second, third)] == [0, 1, 1]
    assert [line["skipped_samples"] for line in (empty, second, third)] == [1, 1, 1]
    assert "skipped: dataset 'shapes', element 1 of " in outcome.stderr and "nowhere.png" in outcome.stderr
    assert summary(run_dir)["first_loss"] == second["loss"]
    batch = tmp_path / "2.safetensors"
    own = ["inspect", "batch", "--config-name=tiny", "step=2", f"out={batch}"]
    assert dhp([*own, *tiny(tiny_assets, run_dir, *overrides)[1:]]) == 0
    assert second["loss"] == pytest.approx(plain_loss(tiny_assets / "model", batch), rel=1e-5)


@pytest.mark.slow
def test_a_norm_that_is_not_finite_ends_the_run_before_the_weights_are_lost(tiny_assets: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    hopeless = [*ONE_ACTOR_EACH, *CONSTANT_RATE, "training.learning_rate=1e30", "training.max_nonfinite_steps=0"]
    outcome = train(*tiny(tiny_assets, run_dir, *hopeless), private_ray=True)
    assert outcome.status == 1
    assert "Diverged: the gradient norm of step 2 is " in outcome.stderr
    assert "Traceback" not in outcome.stderr
    assert (summary(run_dir)["status"], summary(run_dir)["steps"]) == ("failed", 2)
    assert summary(run_dir)["skipped_steps"] == 1
    assert outcome.left == ()


def stop_a_rank(run_dir: Path, process: subprocess.Popen[str], listening: set[str]) -> None:
    """Note where the run listens once it trains, then freeze its last text rank."""
    wait_for_steps(run_dir, 1, process)
    pids = processes_of(process)
    listening |= listening_addresses(pids)
    log = os.fspath(run_dir / "logs" / "text-1.log")
    (frozen,) = [pid for pid in pids if os.readlink(f"/proc/{pid}/fd/1") == log]
    os.kill(frozen, signal.SIGSTOP)


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads Linux's tables of processes and sockets")
@pytest.mark.slow
def test_a_frozen_rank_ends_the_run_and_nothing_ever_listened_beyond_this_host(
    tiny_assets: Path, tmp_path: Path
) -> None:
    run_dir, listening = tmp_path / "run", set()
    arguments = tiny(tiny_assets, run_dir, "training.max_steps=1000", "cluster.collective_timeout_s=10")
    outcome = train(*arguments, meanwhile=lambda process: stop_a_rank(run_dir, process, listening), real=True)
    assert outcome.status == 1
    assert re.search(
        r"PartFailed: (step \d+: )?text rank 1 is stopped or gone: text rank 0 has waited for it", outcome.stderr
    )
    assert "text rank 1: is stopped (SIGSTOP or a debugger; `kill -CONT " in outcome.stderr
    assert summary(run_dir)["status"] == "failed"
    assert outcome.left == ()
    assert listening and listening <= LOOPBACK


def report(rank: int, finite: bool) -> StageReport:
    return StageReport(rank, None, 1.0 if finite else math.nan, {}, None, {}, finite=finite)


def added(count: NonfiniteCount, *steps: bool) -> list[tuple[int, int, bool]]:
    """Of each step, finite or not: the run's count, those in a row, and whether they are too many."""
    found = []
    for finite in steps:
        count.add({"vision": [report(0, finite)], "text": [report(0, finite), report(1, finite)]})
        found.append((count.count, count.in_a_row, count.too_many))
    return found


def test_a_finite_step_begins_the_row_anew() -> None:
    found = added(NonfiniteCount(3), True, False, False, True, False, False, False)
    assert [step[:2] for step in found] == [(0, 0), (1, 1), (2, 2), (2, 0), (3, 1), (4, 2), (5, 3)]
    assert [step[2] for step in found] == [False] * 6 + [True]


@pytest.mark.parametrize("limit", [0, 1])
def test_the_first_may_be_the_last(limit: int) -> None:
    assert added(NonfiniteCount(limit), True, False) == [(0, 0, False), (1, 1, True)]


def test_a_run_that_goes_on_counts_on() -> None:
    lines = [StepMetrics(step=1, skipped_steps=0), StepMetrics(step=2, skipped_steps=1)]
    assert count_before([*lines, EvalMetrics(step=2, dataset=""), StepMetrics(step=3, skipped_steps=2)], 2) == 1
    assert count_before(lines[:1], 1) == 0 and count_before([], 4) == 0
    assert count_before([StepMetrics(step=1)], 1) == 0  # of a release that did not count them
    assert added(NonfiniteCount(3, 4), False) == [(5, 1, False)]


METRICS = StepMetrics(step=7, loss=math.inf, grad_norm=math.nan)


def test_lines_name_step_values_and_samples() -> None:
    said = line(METRICS, 2, 3, ["index=4, dataset 'a', line 5 of a.jsonl"])
    assert said.startswith("the gradient norm of step 7 is nan and its loss inf: nothing was updated (2 in a row; ")
    assert said.endswith("`python -m dhp inspect sample`: index=4, dataset 'a', line 5 of a.jsonl")
    last = last_line(METRICS, 3, 3, ["index=4"])
    assert "number 3 in a row" in last and "weights are those after step 4. Lower training.learning_rate" in last


def test_of_many_samples_some_are_named() -> None:
    assert listed([str(n) for n in range(NAMED)]).endswith(f"; {NAMED - 1}")
    assert listed([str(n) for n in range(NAMED + 5)]).endswith(f"; {NAMED - 1}; and 5 more")


@pytest.mark.slow
def test_a_run_skips_such_steps_names_their_samples_and_ends(tiny_assets: Path, tmp_path: Path) -> None:
    """A rate that no weight survives: all steps behind the first are broken."""
    run_dir = tmp_path / "run"
    wild = ["training.learning_rate=1e30", "training.warmup_ratio=0", "training.lr_scheduler_type=constant"]
    outcome = train(*tiny(tiny_assets, run_dir, *wild, "training.max_steps=9", "training.max_nonfinite_steps=3"))
    assert outcome.status == 1
    assert "Diverged: the gradient norm of step 4 is " in outcome.stderr and "Traceback" not in outcome.stderr
    assert "weights are those after step 1." in outcome.stderr
    lines = [json.loads(one) for one in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [one["skipped_steps"] for one in lines] == [0, 1, 2, 3]
    assert len({one["sample_digest"] for one in lines}) == 4
    assert isinstance(lines[0]["loss"], float) and lines[2]["grad_norm"] in ("NaN", "Infinity")
    told = json.loads((run_dir / "summary.json").read_text())
    assert (told["status"], told["steps"], told["skipped_steps"]) == ("failed", 4, 3)
    said = next(one for one in outcome.stderr.splitlines() if "gradient norm of step 3 is" in one)
    named = re.findall(r"index=(\d+), (dataset 'shapes', element \d+ of [^;]+)", said)
    assert len(named) == lines[2]["samples"]
    index, where = named[0]
    page = tmp_path / "page.html"
    assert dhp(["inspect", "sample", *tiny(tiny_assets, run_dir)[:2], f"index={index}", f"out={page}"]) == 0
    assert where.replace("'", "&#x27;") in page.read_text()
