"""Tables of a report, and samples as small pictures."""

import base64
import io
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from dhp.core.errors import DataError
from dhp.core.files import is_remote
from dhp.core.text import harmless
from dhp.data.media.images import open_image
from dhp.data.media.sources import Video, files_of
from dhp.data.read.annotations import Annotations, read_annotations
from dhp.data.read.records import ANSWERS, Record
from dhp.observe.metrics import AnswerMetrics, StepMetrics
from dhp.observe.ranks import NONFINITE
from dhp.report.bound import Times
from dhp.report.run_record import RunRecord
from dhp.report.views import MIB, sent_bytes

SIDE = 96  # pixels of the longer side
MOST_PICTURES = 3  # of a sample
MOST_TEXT = 160  # characters of a question or an answer
MOST_BYTES = 1_000_000  # of all pictures of a page
MOST_S = 10.0  # that drawing takes: files may be on a slow disk, and a run's end waits for the page
MOST_ANNOTATIONS = 256 * 2**20  # bytes of a file: opening a larger one would hold up the end of a run
_REGISTRY = "data.data_registry."


class Gallery:
    """Draws samples while there is room on the page. What cannot be read any more, or lies behind an address, is left
    out."""

    def __init__(self, config: Mapping[str, Any]):
        """config: of the run, by dotted key."""
        self._config, self._room, self._until = config, MOST_BYTES, time.monotonic() + MOST_S
        self._opened: dict[str, Annotations | None] = {}

    def sample(self, dataset: str, row: int) -> str:
        """HTML about a sample: its pictures, what is asked and what is answered. row: from 0. "": nothing is known."""
        record = self._record(dataset, row)
        if record is None:
            return ""
        texts = (_text(record, answers) for answers in (False, True))
        asked, answered = (escape(harmless(text)) for text in texts)
        return f'<div class="sample">{self._images(record)}<span>{asked}<br><b>{answered}</b></span></div>'

    def images(self, dataset: str, row: int) -> str:
        """HTML of its pictures alone."""
        record = self._record(dataset, row)
        return "" if record is None else self._images(record)

    def _record(self, dataset: str, row: int) -> Record | None:
        if dataset not in self._opened:
            self._opened[dataset] = self._open(dataset)
        annotations = self._opened[dataset]
        try:
            return None if annotations is None or row >= len(annotations) else annotations.record(row)
        except (DataError, OSError):
            return None

    def _open(self, dataset: str) -> Annotations | None:
        prefix = f"{_REGISTRY}{dataset}."
        entry = {key[len(prefix) :]: value for key, value in self._config.items() if key.startswith(prefix)}
        path, folder = str(entry.get("annotation_path") or ""), str(entry.get("data_path") or "")
        # A folder's shards are read through to be counted.
        if not path or is_remote(path) or is_remote(folder) or not Path(path).is_file():
            return None
        if Path(path).stat().st_size > MOST_ANNOTATIONS:
            return None
        columns = {key.partition(".")[2]: str(value) for key, value in entry.items() if key.startswith("columns.")}
        root = Path(folder) if folder else None
        try:
            return read_annotations(dataset, Path(path), root, str(entry.get("format", "auto")), False, columns)
        except (DataError, OSError):
            return None

    def _images(self, record: Record) -> str:
        found = [part for part in record.media if not isinstance(part, Video)]
        drawn = "".join(self._image(files_of(part)[0]) for part in found[:MOST_PICTURES])
        return drawn + (f"<i>and {len(record.media) - MOST_PICTURES} more</i>" if len(found) > MOST_PICTURES else "")

    def _image(self, file: Any) -> str:
        if self._room <= 0 or time.monotonic() > self._until:
            return ""
        try:
            image = open_image(file)
        except (DataError, OSError):
            return "<i>a picture that cannot be read</i>"
        image.thumbnail((SIDE, SIDE))
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", quality=80)
        address = f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"
        self._room -= len(address)
        return f'<img src="{address}" width="{image.width}" height="{image.height}" alt="">'


def _text(record: Record, answers: bool) -> str:
    parts = [
        part
        for turn in record.turns
        if (turn.role == ANSWERS) == answers
        for part in turn.parts
        if isinstance(part, str)
    ]
    text = " ".join(" ".join(parts).split())
    return text if len(text) <= MOST_TEXT else text[:MOST_TEXT] + " …"


MOST_OPENED = 60  # steps whose samples are listed
MOST_ROWS = 100  # samples of a step that are listed
DRAWN = 4  # samples of a step that are drawn
MOST_EVENTS = 200
MOST_ANSWERS = 60
HIGHEST = 10  # steps that stand out by a number, and samples by their loss
AROUND = 10  # steps on each side, beside which one stands out
_PLACES = ("run_dir", "training.checkpoint_dir")  # keys that differ between any two runs


def safe(text: object) -> str:
    """As HTML."""
    return escape(harmless(str(text)))


def table(head: Sequence[str], rows: Sequence[Sequence[str]], classes: str = "") -> str:
    """Cells are HTML already."""
    top = "".join(f"<th>{cell}</th>" for cell in head)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return (
        f'<div class="wide"><table class="{classes}"><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def figures(record: RunRecord, times: Times | None) -> dict[str, str]:
    """The figures of a run by name, as they are shown at its head."""
    last, summary = record.steps[-1], record.summary or {}
    evaluated = [one for one in record.evaluations if one.step == record.evaluations[-1].step]
    found = {
        "status": record.status + (f": {summary['error']}" if summary.get("error") else ""),
        "steps": str(last.step),
        "loss": _number(last.loss),
        "step": "-" if times is None else f"{float(times.step_s.mean()):.3g} s",
        "tokens/s": _number(summary.get("tokens_per_s"), ".0f"),
    }
    if evaluated:
        found["held-out loss"] = ", ".join(f"{one.dataset or 'all'} {_number(one.loss)}" for one in evaluated)
        found["held-out accuracy"] = ", ".join(
            f"{one.dataset or 'all'} {_number(one.accuracy, '.1%')}" for one in evaluated
        )
        found["held-out exact answers"] = ", ".join(
            f"{one.dataset or 'all'} {_number(one.exact, '.1%')}" for one in evaluated
        )
    planned = (summary.get("planned") or {}).get("step_s")
    if planned and times is not None:
        found["planned step"] = f"{planned:.3g} s (took {float(times.step_s.mean()) / planned:.2f} times as long)"
    if last.graphs:
        each = (f"{name} {of['made']}" + _given_up(of["given_up"]) for name, of in last.graphs.items())
        found["compiled graphs"] = ", ".join(each)
    if summary.get("restarts"):
        found["restarts after faults"] = str(summary["restarts"])
    return found


def _given_up(functions: int) -> str:
    return f" (limit reached by {functions} functions, which run uncompiled)" if functions else ""


@dataclass(frozen=True)
class SampleLoss:
    """A sample's loss in a step, nats a token. row: in the annotations of its dataset, from 0."""

    loss: float
    step: int
    dataset: str
    row: int


def highest_losses(record: RunRecord) -> list[SampleLoss]:
    """The samples of highest loss, each with its latest one: of the last epoch of a run of two or more, else of the
    last quarter of its steps, because in the untrained beginning most are high. None of preferences, whose sums are of
    both answers together."""
    if record.compares:
        return []
    first = _late(record.steps)
    latest: dict[tuple[str, int], SampleLoss] = {}
    for line in record.ranks:
        for name, rows in line.samples.items() if line.step >= first else ():
            for row, loss in zip(rows, line.losses.get(name, ()), strict=False):
                if isinstance(row, int) and isinstance(loss, int | float):
                    latest[name, row] = SampleLoss(loss, line.step, name, row)
    finite = lambda one: one.loss if math.isfinite(one.loss) else math.inf
    return sorted(latest.values(), key=lambda one: (-finite(one), one.step, one.dataset, one.row))[:HIGHEST]


def _late(steps: Sequence[StepMetrics]) -> int:
    last = steps[-1]
    if last.epoch is None or last.epoch < 2:
        return last.step - (last.step - steps[0].step) // 4
    return next(one.step for one in steps if one.epoch is not None and one.epoch > last.epoch - 1)


def losses_table(found: Sequence[SampleLoss], opened: Mapping[int, str], gallery: Gallery) -> str:
    """These samples as they are, their steps linked to where they are listed."""
    rows = []
    for one in found:
        step = f'<a href="#step-{one.step}">{one.step}</a>' if one.step in opened else safe(one.step)
        shown = gallery.sample(one.dataset, one.row)
        rows.append([_number(one.loss), step, safe(one.dataset), safe(one.row), shown])
    return table(["loss", "step", "dataset", "row, from 0", ""], rows, "samples")


def opened_steps(record: RunRecord, highest: Sequence[SampleLoss] = ()) -> dict[int, str]:
    """The steps whose samples are listed, and why: those whose loss, gradient norm or time is largest beside the steps
    around them, those of the `highest` samples, those that updated nothing, and others evenly."""
    samples = {line.step for line in record.ranks if line.samples}
    steps = [one for one in record.steps if one.step in samples]
    found: dict[int, str] = {}
    for name, why in (("loss", "high loss"), ("grad_norm", "large gradient"), ("step_s", "slow")):
        for step in _outstanding(steps, name):
            found[step] = f"{found[step]}, {why}" if step in found else why
    for step in {one.step for one in highest}.intersection(one.step for one in steps):
        found.setdefault(step, "a sample of high loss")
    for event in record.events:
        if event.event == NONFINITE and event.step in samples:
            found[event.step] = "updated nothing"
    left = [one.step for one in steps if one.step not in found]
    room = max(0, MOST_OPENED - len(found))
    every = max(1, math.ceil(len(left) / room)) if room else 0
    found |= dict.fromkeys(left[::every] if every else [], "")
    return dict(sorted(found.items()))


def _outstanding(steps: Sequence[StepMetrics], name: str) -> list[int]:
    """The steps in which a number is largest beside the steps around it."""
    known = [(one.step, float(value)) for one in steps if (value := getattr(one, name)) is not None]
    numbers = np.array([value if math.isfinite(value) else np.inf for _, value in known])
    around = [np.median(numbers[max(0, at - AROUND) : at + AROUND + 1]) for at in range(len(numbers))]
    with np.errstate(invalid="ignore", divide="ignore"):
        above = np.nan_to_num(numbers / np.array(around), nan=np.inf, posinf=np.inf)
    order = np.argsort(-above, kind="stable")[:HIGHEST]
    return [known[at][0] for at in order.tolist() if above[at] > 1]


def samples_table(record: RunRecord, opened: Mapping[int, str], gallery: Gallery) -> str:
    """Each opened step with the rows of its samples, and of those that stand out some as they are."""
    lines = {line.step: line for line in record.ranks}
    metrics = {one.step: one for one in record.steps}
    rows = []
    for step, why in opened.items():
        found = "; ".join(f"{safe(name)}: {_listed(of)}" for name, of in lines[step].samples.items())
        if why:
            found += _drawn(lines[step].samples, gallery)
        one = metrics[step]
        head = f'<a id="step-{step}"></a>{step}'
        rows.append([head, why, _number(one.loss), _number(one.grad_norm), _number(one.step_s), found])
    return table(["step", "", "loss", "norm", "seconds", "rows of its samples, from 0, by dataset"], rows, "samples")


def _drawn(samples: Mapping[str, Sequence[int]], gallery: Gallery) -> str:
    turns = zip_longest(*([(name, row) for row in of[:DRAWN]] for name, of in samples.items()))
    chosen = [one for turn in turns for one in turn if one is not None][:DRAWN]
    return "".join(gallery.sample(name, row) for name, row in chosen)


def _listed(rows: Sequence[int]) -> str:
    more = f" and {len(rows) - MOST_ROWS} more" if len(rows) > MOST_ROWS else ""
    return safe(", ".join(map(str, rows[:MOST_ROWS]))) + more


def events_table(record: RunRecord) -> str:
    """Saves, evaluations, skipped samples, faults and starts, in order of time."""
    rows = [(one.time, one.step, one.event, one.seconds, one.text) for one in record.events]
    for fault in record.faults:
        at, step = fault.get("at"), fault.get("step")
        text = f"{fault.get('message') or ''} → {fault.get('followed_by') or ''}"
        rows.append((float(at) if isinstance(at, int | float) else 0.0, step or 0, "fault", None, text))
    rows.sort(key=lambda row: row[0])
    left = len(rows) - MOST_EVENTS
    shown = rows if left <= 0 else [*rows[: MOST_EVENTS // 2], *rows[-MOST_EVENTS // 2 :]]
    cells = [
        [_clock(at), safe(step), safe(event), "" if seconds is None else f"{seconds:.2f}", safe(text)]
        for at, step, event, seconds, text in shown
    ]
    note = f"<p>{left} events between them are left out.</p>" if left > 0 else ""
    return table(["when", "step", "what", "training waited, s", ""], cells, "events") + note


def answers_table(record: RunRecord, gallery: Gallery) -> str:
    """Each held-out question with its reference, and the answers over time."""
    steps = list(dict.fromkeys(one.step for one in record.answers))
    chosen = steps if len(steps) <= 4 else [steps[0], steps[len(steps) // 3], steps[2 * len(steps) // 3], steps[-1]]
    found = [(one.step, one) for one in record.answers]
    return _answers(found, {step: f"after step {safe(step)}" for step in chosen}, lambda _: gallery)


def answers_beside(records: Sequence[RunRecord], galleries: Sequence[Gallery]) -> str:
    """Each question that several runs were asked, and the last answer of each; before them that of the first run before
    it was trained, where it was asked then. galleries: of each run."""
    before = [(-1, one) for one in records[0].answers if one.step == 0]
    found = before + [(number, one) for number, record in enumerate(records) for one in record.answers]
    columns = {-1: f"{safe(records[0].name)} before training"} if before else {}
    columns |= {number: safe(one.name) for number, one in enumerate(records)}
    return _answers(found, columns, lambda column: galleries[max(column, 0)], 2)


def _answers(
    found: Iterable[tuple[int, AnswerMetrics]],
    columns: Mapping[int, str],
    gallery_of: Callable[[int], Gallery],
    least: int = 1,
) -> str:
    """A row for each question that has answers in at least so many columns; of several in one the last. found: the
    column of each answer; one below 0 does not count. gallery_of: a column. "": no question has."""
    by_question: dict[tuple[str, int, str, str, int | None], dict[int, AnswerMetrics]] = {}
    for column, one in found:
        by_question.setdefault((one.dataset, one.number, one.prompt, one.reference, one.row), {})[column] = one
    rows = []
    for (dataset, number, prompt, reference, row), answers in by_question.items():
        if len(rows) == MOST_ANSWERS or sum(column >= 0 for column in answers) < least:
            continue
        drawn = "" if row is None else gallery_of(next(iter(answers))).images(dataset, row)
        cells = [f"{safe(dataset)} {safe(number)}", drawn, safe(prompt), safe(reference)]
        for column in columns:
            answer = answers[column].answer if column in answers else "-"
            right = answer.strip() == reference.strip()
            cells.append(f'<span class="{"right" if right else "other"}">{safe(answer)}</span>')
        rows.append(cells)
    return table(["", "pictures", "question", "reference", *columns.values()], rows, "answers") if rows else ""


def links_table(record: RunRecord, times: Times | None) -> str:
    """Bytes by kind, the rate at which they went, and the seconds that were planned for them."""
    planned = (record.summary or {}).get("planned") or {}
    rows = []
    for stage, kinds in sent_bytes(record.steps).items():
        inside = sum(value for kind, value in kinds.items() if kind != "handoff")
        found = times.stages.get(stage) if times is not None else None
        seconds = float(found.comm.mean()) if found is not None else 0.0
        ranks = found.own.shape[1] if found is not None else 1
        rate = f"{inside / ranks / seconds / MIB:.3g} MiB/s a rank" if seconds else "-"
        expected = _number((planned.get("comm_s") or {}).get(stage), ".3g")
        listed = ", ".join(f"{kind} {value / MIB:.3g}" for kind, value in kinds.items())
        rows.append([safe(stage), listed, f"{seconds:.3g}" if seconds else "-", rate, expected])
    return (
        table(["stage", "MiB a step, by kind", "seconds in collectives", "rate", "planned seconds"], rows)
        if rows
        else ""
    )


def differences_table(records: Sequence[RunRecord]) -> str:
    """Keys that the runs have with different values."""
    keys = dict.fromkeys(key for record in records for key in record.config if key not in _PLACES)
    rows = []
    for key in keys:
        values = [record.config.get(key, "-") for record in records]
        if any(value != values[0] for value in values):
            rows.append([safe(key), *map(safe, values)])
    if not rows:
        return "<p>The runs have the same configuration.</p>"
    return table(["key", *(safe(record.name) for record in records)], rows)


def _number(value: Any, spec: str = ".4g") -> str:
    return format(value, spec) if isinstance(value, int | float) else "-"


def _clock(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S") if seconds else "-"
