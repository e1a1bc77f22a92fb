"""dhp.trainer.references and dhp.data.sampling.references: what preferences are compared with."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dhp.config.training import PreferenceConfig, TrainingConfig
from dhp.core.batch import StepInfo
from dhp.core.preferences import Mark
from dhp.core.reports import SampleSums
from dhp.trainer.preference_means import add_by_side, preference_means
from dhp.trainer.step_reports import SampleSum
from tests.helpers.runs import ONE_ACTOR_EACH, tiny, train


@pytest.fixture(scope="module")
def pairs(tiny_assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of the tiny set, each with another one's answer as the worse."""
    rows, said = json.loads((tiny_assets / "data" / "annotations.json").read_text()), []
    for number, row in enumerate(rows[:40]):
        turns, other = row["conversations"], rows[(number + 7) % len(rows)]["conversations"][-1]["value"]
        if other != turns[-1]["value"]:
            shown = row.get("image", [])
            shown = shown if isinstance(shown, list) else [shown]
            said.append({"conversations": turns, "rejected_response": other, "images": shown})
    path = tmp_path_factory.mktemp("pairs") / "pairs.json"
    path.write_text(json.dumps(said))
    return path


def settings(pairs: Path, assets: Path, cache: Path, *more: str) -> tuple[str, ...]:
    entry = f"{{annotation_path: {pairs}, data_path: {assets / 'data'}}}"
    data = (f"+data.data_registry.pairs={entry}", "data.datasets=[pairs]", f"data.cache_dir={cache}")
    return (*ONE_ACTOR_EACH, *data, "training.objective=dpo", "training.learning_rate=1e-3", *more)


def lines(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def losses(run_dir: Path) -> list[float]:
    return [line["loss"] for line in lines(run_dir)]


@pytest.mark.slow
def test_a_run_begins_at_its_reference_and_goes_on(pairs: Path, tiny_assets: Path, tmp_path: Path) -> None:
    """Chance at first; a resumed run has the same references, and another run of the model those that are there."""
    given = settings(pairs, tiny_assets, tmp_path / "cache", "training.max_steps=4", "training.save_steps=2")
    whole = train(*tiny(tiny_assets, tmp_path / "whole", *given))
    assert whole.status == 0 and "log-probabilities of pairs by the reference" in whole.stdout, whole.stderr
    assert losses(tmp_path / "whole")[0] == pytest.approx(math.log(2), rel=1e-6)
    means = [
        json.loads(line)["preferences"] for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()
    ]
    assert means[0]["margin"] == 0.0 and abs(means[3]["margin"]) > 1e-3
    first = tmp_path / "whole" / "checkpoints" / "step_2"
    again = train(*tiny(tiny_assets, tmp_path / "again", *given, f"training.resume={first}"))
    assert again.status == 0 and "by the reference" not in again.stdout, again.stderr
    assert losses(tmp_path / "again") == losses(tmp_path / "whole")[2:]
    lost = settings(pairs, tiny_assets, tmp_path / "other", "training.max_steps=4", f"training.resume={first}")
    refused = train(*tiny(tiny_assets, tmp_path / "lost", *lost))
    assert refused.status != 0 and "goes on with weights that have changed since" in refused.stdout + refused.stderr


@pytest.mark.slow
def test_adapters_are_left_out_of_the_reference(pairs: Path, tiny_assets: Path, tmp_path: Path) -> None:
    """A run that is resumed without its cache computes the same references anew: the model without adapters."""
    lora = (
        "text.lora.rank=4",
        "training.frozen=[vision,projector]",
        "training.save_steps=2",
        "text.parallelism=tensor",
    )
    more = ("training.max_steps=4", *lora, "text.num_actors=2")
    whole = train(*tiny(tiny_assets, tmp_path / "whole", *settings(pairs, tiny_assets, tmp_path / "cache", *more)))
    assert whole.status == 0, whole.stderr
    first = tmp_path / "whole" / "checkpoints" / "step_2"
    moved = settings(pairs, tiny_assets, tmp_path / "other", *more, f"training.resume={first}")
    again = train(*tiny(tiny_assets, tmp_path / "again", *moved))
    assert again.status == 0 and "by the reference" in again.stdout, again.stderr
    assert losses(tmp_path / "again") == pytest.approx(losses(tmp_path / "whole")[2:], rel=1e-6)
    tables = [np.load(next((tmp_path / name / "references").glob("*.npy"))) for name in ("cache", "other")]
    assert np.allclose(*tables, rtol=1e-6, equal_nan=True) and np.isfinite(tables[0]).all()


NUMBERS = ("step", "epoch", "done", "samples", "images", "tokens", "target_tokens", "total_weight", "vision_tokens")


def info(**changes: Any) -> StepInfo:
    more = {"skipped": (), "padded_tokens": 0, "dist_ratio": {}, "flops": {}, "data_s": 0, "measure_s": 0}
    return StepInfo(**{**dict.fromkeys(NUMBERS, 0), **more, **changes})


MARKS = ((Mark(1, -3.0), Mark(-1, -5.0, False), Mark(1, -2.0), Mark(-1, -2.5, False)),)
PLACES = ((("a", 4), ("a", 4), ("b", 0), ("b", 0)),)


def test_both_sides_are_added_over_shards() -> None:
    """Two ranks share a row; the second has no token of the first answer."""
    shards = [
        SampleSums({0: (2.0, 1.5, 0.5, 1.0)}, {0: (2, 1, 1, 1)}),
        SampleSums({0: (0.0, 2.5, 1.0, 2.0)}, {0: (0, 2, 1, 2)}),
    ]
    step = info(order=(PLACES,), marks=(MARKS,))
    found = add_by_side(step, shards, 2)
    assert found == {("a", 4): (SampleSum(2.0, 2), SampleSum(4.0, 3)), ("b", 0): (SampleSum(1.5, 2), SampleSum(3.0, 3))}
    training = TrainingConfig(objective="dpo", preference=PreferenceConfig(beta=0.5))
    means = preference_means([step], [shards], 2, training)
    assert means is not None
    assert means["chosen_reward"] == pytest.approx(0.5 * ((-2.0 + 3.0) + (-1.5 + 2.0)) / 2)
    assert means["rejected_reward"] == pytest.approx(0.5 * ((-4.0 + 5.0) + (-3.0 + 2.5)) / 2)
    assert means["margin"] == pytest.approx(means["chosen_reward"] - means["rejected_reward"])
    assert means["accuracy"] == 0.5  # the first moved as much on both sides


def test_a_batch_that_could_not_be_read_has_no_preferences() -> None:
    assert add_by_side(info(order=(((),),), marks=()), [None], 1) == {}


def test_a_row_that_a_step_has_twice_counts_once() -> None:
    """Where data are fewer than a step's: its sums are of both times, and so are its references."""
    training = TrainingConfig(objective="dpo", preference=PreferenceConfig(beta=0.5))
    once = info(order=((PLACES[0][:2],),), marks=((MARKS[0][:2],),))
    twice = info(order=((PLACES[0][:2] * 2,),), marks=((MARKS[0][:2] * 2,),))
    sums = SampleSums({0: (2.0, 4.0)}, {0: (2, 3)}), SampleSums({0: (2.0, 4.0) * 2}, {0: (2, 3) * 2})
    expected = preference_means([once], [[sums[0]]], 1, training)
    assert expected is not None and expected["chosen_reward"] == pytest.approx(0.5)
    assert preference_means([twice], [[sums[1]]], 1, training) == pytest.approx(expected)


def test_an_answer_that_is_not_liked_is_won_where_it_lost() -> None:
    """It became less likely, the answer to another prompt did not move; and a liked one that did the same has lost."""
    training = TrainingConfig(objective="kto", preference=PreferenceConfig(beta=0.5))
    shards = [SampleSums({0: (4.0, 4.0)}, {0: (2, 3)})]
    found = []
    for side in (-1, 1):
        marks = ((Mark(side, -2.0), Mark(0, -4.0, False)),)
        means = preference_means([info(order=((PLACES[0][:2],),), marks=(marks,))], [shards], 1, training)
        assert means is not None
        found.append((means["chosen_reward"], means["margin"], means["accuracy"]))
    assert found == [(-1.0, 1.0, 1.0), (-1.0, -1.0, 0.0)]


def test_without_a_reference_means_are_by_token() -> None:
    shards = [SampleSums({0: (2.0, 4.0, 1.5, 3.0)}, {0: (2, 3, 2, 3)})]
    means = preference_means([info(order=(PLACES,), marks=(MARKS,))], [shards], 1, TrainingConfig(objective="orpo"))
    assert means is not None and means["chosen_logp"] == pytest.approx(-(2.0 / 2 + 1.5 / 2) / 2)
    assert preference_means([info()], [shards], 1, TrainingConfig(objective="dpo")) is None
