"""Which stages a way has, and what is read of a curriculum that has ended."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from dhp.config.command_line import compose_config
from dhp.config.devices import shipped_directory
from dhp.config.resolve import training_stages
from dhp.core.text import json_safe
from dhp.observe.metrics import EvalMetrics, Line, StepMetrics
from experiments.stages_on_off.__main__ import (
    FIRST,
    LAST,
    PICTURES,
    VIDEOS,
    WAYS,
    first_alone,
    hold_out,
    kept_stages,
    lengths,
    row_of,
    without,
)
from tests.helpers.figures import Sentences, missing, rows

PAGE = "experiments/stages_on_off/README.md"
SETS = [f"held_out_{name}" for name in (PICTURES, *VIDEOS)]


def ended(run_dir: Path, stages: list[str]) -> Path:
    """A curriculum's directory, of these stages."""
    last = run_dir / f"{len(stages)}_{stages[-1]}"
    last.mkdir(parents=True)
    told = {f"{number}_{name}": {"steps": 10 * number} for number, name in enumerate(stages, start=1)}
    (run_dir / "stages.json").write_text(json.dumps(told))
    found = [EvalMetrics(step=3, dataset=name, loss=0.5, accuracy=0.75, samples=2) for name in SETS]
    lines: list[Line] = [StepMetrics(step=3, loss=1.0), *found, EvalMetrics(step=3, dataset="", loss=9.0, accuracy=0.1)]
    (last / "metrics.jsonl").write_text("".join(json.dumps(json_safe(asdict(line))) + "\n" for line in lines))
    return run_dir


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_way_has_the_other_stages_and_is_asked_in_the_last_one(way: str, tmp_path: Path) -> None:
    asked = hold_out(tmp_path, 2)
    config = compose_config("five_stages_tiny", None, [*without(way), *asked])
    stages = training_stages(config, shipped_directory() / "stage")
    assert [stage.name for stage in stages] == kept_stages(way)
    assert [list(stage.config.data.eval_datasets) for stage in stages] == [[]] * (len(stages) - 1) + [SETS]
    for name in SETS:
        assert Path(config.data.data_registry[name].annotation_path).is_file()


def test_stage_4_is_two_entries_and_stage_3_one() -> None:
    assert [len(kept_stages(way)) for way in WAYS] == [6, 5, 4, 3]


@pytest.mark.slow
def test_stages_may_be_made_shorter() -> None:
    own = lengths(kept_stages("without 4"), 2, 5)
    config = compose_config("five_stages_tiny", None, [*without("without 4"), *own])
    stages = training_stages(config, shipped_directory() / "stage")
    assert [stage.config.training.max_steps for stage in stages] == [2, 2, 2, 5]
    assert lengths(FIRST, None, 5) == []


@pytest.mark.slow
def test_all_ways_share_the_first_stages() -> None:
    config = compose_config("five_stages_tiny", None, first_alone())
    assert list(config.stages) == list(FIRST)
    assert all(kept_stages(way)[:2] == list(FIRST) and kept_stages(way)[-1] == LAST for way in WAYS)


def test_a_row_has_each_held_out_set(tmp_path: Path) -> None:
    row = row_of("without 4", 7, ended(tmp_path / "run", kept_stages("without 4")))
    assert (row["stage_3"], row["stage_4"], row["seed"]) == (True, False, 7)
    assert row["steps"] == {"alignment": 10, "pretraining": 20, "short_finetuning": 30, LAST: 40}
    assert row["loss"] == dict.fromkeys((PICTURES, *VIDEOS), 0.5)
    assert row["accuracy"] == dict.fromkeys((PICTURES, *VIDEOS), 0.75)


def figures() -> Sentences:
    """What documents have of the rows that are kept."""
    losses: dict[str, list[str]] = {}
    for row in rows("stages_on_off"):
        cells = [f"{row['loss'][name]:.2f}, {row['accuracy'][name]:.0%}" for name in (PICTURES, *VIDEOS)]
        yield PAGE, f"| {row['way']} | {row['seed']} | {' | '.join(cells)} |"
        losses.setdefault(row["way"], []).append(f"{row['loss']['long']:.2f}")
    means = {way: sum(map(float, of)) / len(of) for way, of in losses.items()}
    yield PAGE, ", ".join(f"{mean:.2f} {way}" for way, mean in means.items())
    words = "; ".join(f"{way} {', '.join(of)}" for way, of in losses.items())
    yield "experiments/PAPERS.md", f"held-out loss on long videos by three seeds: {words}"


def test_documents_have_the_rows() -> None:
    assert missing(figures()) == [] and {row["way"] for row in rows("stages_on_off")} == set(WAYS)


def test_a_curriculum_of_another_way_is_refused(tmp_path: Path) -> None:
    run_dir = ended(tmp_path / "run", kept_stages("without 3"))
    with pytest.raises(ValueError, match="without 4 has the stages alignment, pretraining, short_finetuning, long_f"):
        row_of("without 4", 0, run_dir)
