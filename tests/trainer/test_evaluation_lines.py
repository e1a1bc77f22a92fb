"""What an evaluation makes of its batches: a line for each dataset, and one for all of them together."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from dhp.core.batch import StepInfo
from dhp.core.reports import EvaluatedShare
from dhp.observe.metrics import EvalMetrics
from dhp.trainer.evaluation import EvalData, Evaluation, _Done, _metrics


def batch(targets: int, loss: float, right: int = 3) -> _Done:
    """A batch of two samples and a bad one, whose loss and right tokens two shards have together."""
    info = StepInfo(
        step=0, epoch=0, done=0.0, samples=2, images=0, tokens=50, target_tokens=targets, vision_tokens=0,
        total_weight=targets, padded_tokens=0, dist_ratio={}, flops={}, skipped=("bad",), data_s=0.0, measure_s=0.0,
    )  # fmt: skip
    return _Done(info, (EvaluatedShare(loss / 2, 1, targets), EvaluatedShare(loss / 2, right - 1, 0)))


def test_of_batches_each_token_counts_alike() -> None:
    assert _metrics(7, "a", [batch(10, 4.0), batch(30, 2.0)], 1.5) == EvalMetrics(
        step=7, dataset="a", loss=2.5, accuracy=6 / 40, target_tokens=40, tokens=100, samples=4, skipped_samples=2,
        seconds=1.5,
    )  # fmt: skip
    assert _metrics(7, "a", [], 0.0).loss is None


def test_of_batches_each_weight_counts_alike() -> None:
    """Of an objective whose N is no number of tokens."""
    info = SimpleNamespace(target_tokens=9, tokens=9, samples=1, skipped=())
    weights = {1.5: 4.0, 0.5: 8.0}
    infos = [SimpleNamespace(**vars(info), total_weight=weight) for weight in weights]
    done = [_Done(of, (EvaluatedShare(loss, 1, 9),)) for of, loss in zip(infos, weights.values(), strict=True)]
    assert _metrics(7, "a", done, 0.0).loss == 5.0


class Evaluated(Evaluation):
    """Datasets whose batches are there already."""

    def __init__(self, **datasets: list[_Done]):
        self._done = datasets
        cluster, data = SimpleNamespace(step_timeout_s=1.0), SimpleNamespace(eval_datasets=list(datasets))
        super().__init__(SimpleNamespace(config=SimpleNamespace(cluster=cluster, data=data), graph=None))

    def _open(self, name: str) -> EvalData:
        nobody: Any = None
        return EvalData(name, nobody, len(self._done[name]), None)

    def _batches(self, data: EvalData) -> list[_Done]:
        return self._done[data.name]


def test_of_several_datasets_the_last_line_is_of_all_their_batches_together() -> None:
    lines = Evaluated(a=[batch(10, 4.0), batch(30, 2.0)], b=[batch(60, 5.0, right=8)]).run(7)
    found = [(line.dataset, line.loss, line.accuracy, line.target_tokens, line.samples) for line in lines]
    assert found == [("a", 2.5, 6 / 40, 40, 4), ("b", 5.0, 8 / 60, 60, 2), ("", 4.0, 14 / 100, 100, 6)]
    assert lines[2].seconds == lines[0].seconds + lines[1].seconds


def test_one_dataset_has_one_line() -> None:
    assert [line.dataset for line in Evaluated(a=[batch(10, 4.0)]).run(7)] == ["a"]
