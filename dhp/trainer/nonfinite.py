"""Steps that updated nothing because their loss or gradient was not finite: counted, named, and the end of a run that
has too many of them in a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dhp.core.errors import Diverged
from dhp.core.reports import StageReport
from dhp.observe.events import NONFINITE
from dhp.observe.metrics import Line, StepMetrics
from dhp.observe.recorder import Recorder
from dhp.trainer.session import Session

NAMED = 20  # samples of a step that a line names
ADVICE = "Lower training.learning_rate, set training.max_grad_norm, or look at the samples"


class NonfiniteCount:
    """How many steps updated nothing: of the run, and in a row. limit: `training.max_nonfinite_steps`."""

    def __init__(self, limit: int, count: int = 0):
        """count: of the steps before, in a run that is continued."""
        self.count, self.in_a_row, self._limit = count, 0, limit

    @property
    def too_many(self) -> bool:
        """Whether the step that was added last is to be the run's last."""
        return self.in_a_row >= max(1, self._limit)

    def add(self, reports: Mapping[str, Sequence[StageReport]]) -> int:
        """A step has ended, of which every rank has reported; the count of the run."""
        finite = all(report.finite for of_stage in reports.values() for report in of_stage)
        self.in_a_row = 0 if finite else self.in_a_row + 1
        self.count += not finite
        return self.count


class NonfiniteSteps:
    """Those of a run."""

    def __init__(self, session: Session, recorder: Recorder):
        self._session, self._recorder = session, recorder
        self._limit, step = session.config.training.max_nonfinite_steps, session.start.step
        self._found = NonfiniteCount(self._limit, count_before(recorder.record_so_far(), step) if step else 0)

    def add(self, reports: Mapping[str, Sequence[StageReport]]) -> int:
        """As `NonfiniteCount.add`."""
        return self._found.add(reports)

    def tell(self, metrics: StepMetrics) -> None:
        """Say a line about the step that was added last, if it updated nothing. Raises Diverged where it is one too
        many in a row."""
        if not self._found.in_a_row:
            return
        timeout_s = self._session.config.cluster.step_timeout_s
        names = self._session.data.ask("sample_names", metrics.step - 1, timeout_s=timeout_s)
        if self._found.too_many:
            raise Diverged(last_line(metrics, self._found.in_a_row, self._limit, names))
        text = line(metrics, self._found.in_a_row, self._limit, names)
        self._recorder.say(text)
        self._recorder.note(NONFINITE, metrics.step, text=text)


def line(metrics: StepMetrics, in_a_row: int, limit: int, names: Sequence[str]) -> str:
    """About a step that updated nothing, of samples of these names."""
    return (
        f"{_found(metrics)}: nothing was updated ({in_a_row} in a row; training.max_nonfinite_steps={limit} end the "
        f"run). Its samples, for `python -m dhp inspect sample`: {listed(names)}"
    )


def last_line(metrics: StepMetrics, in_a_row: int, limit: int, names: Sequence[str]) -> str:
    """About the one that ends a run."""
    before = metrics.step - in_a_row
    return (
        f"{_found(metrics)}; training.max_nonfinite_steps={limit}, and this is number {in_a_row} in a row. None of "
        f"them was taken: weights are those after step {before}. {ADVICE} by `python -m dhp inspect sample`: "
        f"{listed(names)}"
    )


def count_before(lines: Sequence[Line], step: int) -> int:
    """Steps that updated nothing up to `step`, by the record of a run."""
    counts = [one.skipped_steps or 0 for one in lines if isinstance(one, StepMetrics) and one.step <= step]
    return counts[-1] if counts else 0


def listed(names: Sequence[str]) -> str:
    """The first of them, and how many more there are."""
    more = f"; and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return "; ".join(names[:NAMED]) + more


def _found(metrics: StepMetrics) -> str:
    return f"the gradient norm of step {metrics.step} is {metrics.grad_norm} and its loss {metrics.loss}"
