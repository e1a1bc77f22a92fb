"""dhp.trainer.early_stopping: a run ends where evaluations stop getting better; one that goes on ends there too."""

import json
from pathlib import Path

import pytest

from dhp.config.command_line import compose_config
from dhp.config.resolve import resolve
from dhp.config.training import EarlyStoppingConfig
from dhp.core.errors import ConfigError
from dhp.observe.metrics import EvalMetrics
from dhp.trainer.early_stopping import EarlyStopping, metric_value
from tests.helpers.runs import ONE_ACTOR_EACH, tiny, train


def lines(step: int, loss: float | None, accuracy: float = 0.5, margin: float = 0.0) -> list[EvalMetrics]:
    first = EvalMetrics(step=step, dataset="a", loss=loss, accuracy=accuracy, preferences={"margin": margin})
    return [first, EvalMetrics(step=step, dataset="b", loss=9.0, accuracy=0.0)]


def stops_after(asked: EarlyStoppingConfig, found: list[list[EvalMetrics]]) -> int | None:
    stopping = EarlyStopping(asked, {})
    for one in found:
        stopping.add(one)
        if stopping.stops:
            return one[0].step
    return None


@pytest.mark.parametrize(
    ("losses", "min_delta", "step"),
    [
        ([3.0, 2.0, 1.0, 0.5, 0.4], 0.0, None),
        ([3.0, 2.0, 2.0, 2.5, 1.0], 0.0, 8),
        ([3.0, 2.95, 2.9, 2.0, 1.0], 0.2, 6),
        ([3.0, 2.9, 2.7, 2.6, 2.4], 0.25, None),  # beside the best, not beside the last
        ([3.0, None, 2.0, float("nan"), float("nan")], 0.0, 10),
    ],
)
def test_it_waits_for_a_better_one(losses: list[float | None], min_delta: float, step: int | None) -> None:
    found = [lines(2 * number, loss) for number, loss in enumerate(losses, start=1)]
    assert stops_after(EarlyStoppingConfig("eval_loss/a", 2, min_delta), found) == step
    assert stops_after(EarlyStoppingConfig(None, 2, min_delta), found) is None


def test_what_is_better_higher_is() -> None:
    found = [
        lines(step, 1.0, accuracy, margin) for step, accuracy, margin in ((1, 0.1, 3.0), (2, 0.2, 2.0), (3, 0.3, 1.0))
    ]
    assert stops_after(EarlyStoppingConfig("eval_accuracy/a", 2), found) is None
    assert stops_after(EarlyStoppingConfig("eval_margin/a", 2), found) == 3
    assert metric_value("eval_loss", found[0]) == 9.0  # of all: the last line


def test_its_state_goes_on() -> None:
    asked = EarlyStoppingConfig("eval_loss/a", 3)
    first = EarlyStopping(asked, {})
    for step, loss in ((2, 1.0), (4, 1.5)):
        first.add(lines(step, loss))
    again = EarlyStopping(asked, json.loads(json.dumps(first.state)))
    again.add(lines(4, 1.5))  # which was counted
    again.add(lines(6, 1.2))
    assert again.state == {"best": 1.0, "waited": 2, "step": 6} and not again.stops
    again.add(lines(8, 1.1))
    assert again.stops and "after step 8: eval_loss/a has not become better by more than 0 in 3" in again.line()


@pytest.mark.slow
def test_a_run_ends_and_one_that_goes_on_ends_where_it_would_have(tiny_assets: Path, tmp_path: Path) -> None:
    asked = "training.early_stopping={metric: eval_loss, patience: 3, min_delta: 0.05}"
    more = ("training.max_steps=40", "training.eval_steps=2", "training.save_steps=4", "training.learning_rate=1e-6")
    settings = (*ONE_ACTOR_EACH, asked, *more, "data.eval_datasets=[shapes%5]")
    whole = train(*tiny(tiny_assets, tmp_path / "whole", *settings))
    told = whole.stdout + whole.stderr
    assert whole.status == 0 and "stopped early after step 8: eval_loss has not" in told, whole.stderr
    first = tmp_path / "whole" / "checkpoints" / "step_4"
    seldom = ("training.save_steps=3", f"training.resume={first}")  # its last step is no third one
    again = train(*tiny(tiny_assets, tmp_path / "again", *settings, *seldom))
    assert again.status == 0 and "stopped early after step 8" in again.stdout + again.stderr, again.stderr
    states = [_state(tmp_path / name / "checkpoints" / "step_8") for name in ("whole", "again")]
    assert states[0]["waited"] == 2  # its last evaluation comes behind it
    assert states[1] == states[0] | {"waited": 3, "step": 8}
    done = train(*tiny(tiny_assets, tmp_path / "whole", *settings, "training.resume=auto"))
    assert done.status == 0 and "stopped early after step 8" in done.stdout + done.stderr, done.stderr


def _state(checkpoint: Path) -> dict:
    return json.loads((checkpoint / "checkpoint.json").read_text())["early_stopping"]


@pytest.mark.parametrize(
    ("objective", "metric", "said"),
    [
        ("sft", "eval_margin", "margins are of preferences"),
        ("dpo", "eval_exact/shapes", "of preferences there is none"),
    ],
)
def test_a_metric_that_never_is_there_is_refused(objective: str, metric: str, said: str) -> None:
    asked = (f"training.objective={objective}", f"training.early_stopping.metric={metric}", "training.eval_steps=2")
    with pytest.raises(ConfigError, match=f"{metric} with training.objective={objective}, of which no evaluation has"):
        resolve(compose_config("tiny", overrides=["data.eval_datasets=[shapes]", *asked]))


@pytest.mark.parametrize(
    ("objective", "key"),
    [("kto", "label_smoothing=0.1"), ("dpo", "liked_weight=2.0"), ("orpo", "reference=base"), ("sft", "beta=0.2")],
)
def test_a_setting_that_the_objective_does_not_read_is_refused(objective: str, key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key} with training.objective={objective}, which does not read it"):
        resolve(compose_config("tiny", overrides=[f"training.objective={objective}", f"training.preference.{key}"]))
