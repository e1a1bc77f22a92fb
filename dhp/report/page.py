"""Writes the report as one HTML file without scripts."""

import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

from dhp.core.files import write_whole
from dhp.core.text import shell_command
from dhp.report.bound import HEALTHY, Times, find_causes, sentence, times_of
from dhp.report.charts import PALETTE, Drawing, Line, line_chart
from dhp.report.run_record import RunRecord, read_run
from dhp.report.tables import (
    Gallery,
    SampleLoss,
    answers_beside,
    answers_table,
    differences_table,
    events_table,
    figures,
    highest_losses,
    links_table,
    losses_table,
    opened_steps,
    safe,
    samples_table,
    table,
)
from dhp.report.views import learning_views, load_views, memory_views, time_views

FILE = "report.html"
_DARK = ("#56a8e0", "#f0b440", "#2fc495", "#de9cc0", "#84c8f2", "#f07c30", "#aaaaaa", "#a99bf2", "#dddddd", "#444444")
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; form-action 'none'; base-uri 'none'"


def write_report(runs: Sequence[Path], out: Path, png: Path | None = None) -> Path:
    """Write the report on one run, or on several side by side; its path. png: a folder for the charts. Raises
    RecordError for a directory that is no run's, OSError where it cannot be written."""
    records = [read_run(run) for run in runs]
    page = run_page(records[0]) if len(records) == 1 else runs_page(records)
    write_whole(out, page)
    if png is not None:
        for drawing in drawings(records):
            drawing.write_png(png)
    return out


def drawings(records: Sequence[RunRecord]) -> list[Drawing]:
    """All charts of the report on these runs."""
    if len(records) > 1:
        return list(_beside(records))
    record, times = records[0], times_of(records[0])
    timed = [] if times is None else time_views(times)
    return [*timed, *memory_views(record), *learning_views(record, {}), *load_views(record)]


def run_page(record: RunRecord) -> str:
    """The page about one run."""
    times, highest, gallery = times_of(record), highest_losses(record), Gallery(record.config)
    opened = opened_steps(record, highest)
    links = {step: f"#step-{step}" for step in opened}
    parts = [
        _bound(record, times),
        _facts(record, times),
        _section("Where a step's time went", [] if times is None else time_views(times), _TIME),
        _section("Memory", memory_views(record), _MEMORY),
        _section("Learning", learning_views(record, links), _LEARNING),
        _highest(highest, opened, gallery),
        _samples(record, opened, gallery),
        _section("Load and speed", load_views(record), links_table(record, times)),
        f"<section><h2>Events</h2>{events_table(record)}</section>",
    ]
    if record.answers:
        parts.append(f"<section><h2>Answers to held-out pictures</h2>{answers_table(record, gallery)}</section>")
    return _page(f"{record.name}: {record.status}", parts)


def runs_page(records: Sequence[RunRecord]) -> str:
    """The page about several runs: what differs first."""
    known = [(record, times_of(record)) for record in records]
    facts = [figures(record, times) for record, times in known]
    names = list(dict.fromkeys(name for of in facts for name in of))
    rows = [[safe(name), *(safe(of.get(name, "-")) for of in facts)] for name in names]
    bounds = "".join(f"<p><b>{safe(record.name)}</b>: {safe(sentence(record, times))}</p>" for record, times in known)
    parts = [
        f"<section><h2>What differs</h2>{differences_table(records)}</section>",
        f"<section><h2>What came of it</h2>{table(['', *(safe(one.name) for one in records)], rows)}{bounds}</section>",
        _section("Side by side", _beside(records)),
    ]
    if answered := answers_beside(records, [Gallery(record.config) for record in records]):
        parts.append(f"<section><h2>The last answers to the same questions</h2>{answered}</section>")
    return _page(" beside ".join(record.name for record in records), parts)


def _beside(records: Sequence[RunRecord]) -> Iterable[Drawing]:
    loss = records[0].loss_unit
    for key, title, unit in (
        ("loss", "Loss", loss),
        ("grad_norm", "Norm of the gradient before clipping", loss),
        ("step_s", "Time of a step", "seconds"),
        ("tokens_per_s", "Speed", "tokens a second"),
    ):
        lines = []
        for record in records:
            of = [(one.step, value) for one in record.steps if (value := getattr(one, key)) is not None]
            lines.append(Line(record.name, [step for step, _ in of], [value for _, value in of]))
        yield line_chart(key, title, lines, unit)
    held = [
        Line(record.name, [one.step for one in found], [one.loss or 0.0 for one in found])
        for record in records
        if (found := [one for one in record.evaluations if one.loss is not None and one.dataset == _all(record)])
    ]
    if held:
        yield line_chart("held_out", "Held-out loss", held, loss)


def _all(record: RunRecord) -> str:
    """The dataset of the evaluation's lines about all datasets."""
    names = {one.dataset for one in record.evaluations}
    return "" if "" in names or not names else min(names)


def _bound(record: RunRecord, times: Times | None) -> str:
    causes = find_causes(record, times) if times is not None else []
    rows = [[safe(one.what), f"{one.share:.0%}", f"{one.faster:.2f} ×", safe(one.change)] for one in causes]
    more = table(["what takes time", "of a step", "a step without it", "change"], rows, "causes") if rows else ""
    return (
        f'<section class="bound"><p class="sentence">{safe(sentence(record, times))}</p>'
        f"<details><summary>All that could go, from {HEALTHY:.0%} of a step on worth a change</summary>{more}</details>"
        "</section>"
    )


def _facts(record: RunRecord, times: Times | None) -> str:
    rows = "".join(
        f"<tr><th>{safe(name)}</th><td>{safe(value)}</td></tr>" for name, value in figures(record, times).items()
    )
    broken = f"<p>{record.broken} lines of metrics.jsonl could not be read.</p>" if record.broken else ""
    return f'<section><table class="facts">{rows}</table>{broken}</section>'


def _highest(highest: Sequence[SampleLoss], opened: dict[int, str], gallery: Gallery) -> str:
    if not highest:
        return ""
    return (
        "<section><h2>Samples of highest loss</h2><p>Mean of a sample's learned tokens before the step, in the last "
        "epoch, or the last quarter of the steps of a run of less than two; each sample once, with its latest. A high "
        "one may be hard, or labelled wrong.</p>"
        f"{losses_table(highest, opened, gallery)}</section>"
    )


def _samples(record: RunRecord, opened: dict[int, str], gallery: Gallery) -> str:
    if not opened:
        return ""
    shown = shlex.join(shell_command("inspect", "sample", str(record.run_dir.absolute() / "config.yaml")))
    return (
        "<section><h2>Samples of steps</h2><details open><summary>Steps whose loss, gradient or time stands out "
        f"from those around them, and others evenly</summary>{samples_table(record, opened, gallery)}</details>"
        f"<p>See one as the model does: <code>{safe(shown)} data.datasets=[DATASET] index=ROW</code></p></section>"
    )


def _section(title: str, drawn: Iterable[Drawing], more: str = "") -> str:
    charts = "".join(map(_figure, drawn))
    return f"<section><h2>{title}</h2>{charts}{more}</section>" if charts else ""


def _figure(drawing: Drawing) -> str:
    caption = f"<figcaption>{safe(drawing.title)}</figcaption>"
    return f'<figure>{caption}<div class="wide">{drawing.svg()}</div></figure>'


def _page(title: str, parts: Sequence[str]) -> str:
    return (
        '<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f"<title>{safe(title)}</title>\n<style>\n{_style()}</style></head>\n<body>\n<h1>{safe(title)}</h1>\n"
        + "\n".join(part for part in parts if part)
        + "\n</body>\n</html>\n"
    )


def _style() -> str:
    def colours(palette: Sequence[str]) -> str:
        return "".join(f"--c{number}: {colour}; " for number, colour in enumerate(palette))

    fills = "".join(f".f{number} {{ fill: var(--c{number}) }} " for number in range(len(PALETTE)))
    lines = "".join(f".l{number} {{ stroke: var(--c{number}) }} " for number in range(len(PALETTE)))
    dark = f":root {{ {colours(_DARK)} --paper: #16181c; --ink: #e4e4e4; --faint: #2a2d33; --strong: #24303c; }}"
    return (
        f":root {{ color-scheme: light dark; {colours(PALETTE)} --paper: #fff; --ink: #222; --faint: #eee; "
        f"--strong: #eaf3fa; }}\n@media screen and (prefers-color-scheme: dark) {{ {dark} }}\n{fills}\n{lines}\n"
        + _STYLE
    )


_STYLE = """\
body { font: 15px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 62em; padding: 1em; color: var(--ink);
  background: var(--paper); }
h1 { font-size: 1.4em; overflow-wrap: anywhere } h2 { font-size: 1.15em; margin-top: 2em }
.bound { background: var(--strong); padding: .5em 1em; border-radius: 8px }
.sentence { font-size: 1.15em; font-weight: 600 }
figure { margin: 1em 0 } figcaption { font-weight: 600 }
svg { width: 100%; height: auto; min-width: 36em; max-width: 62em }
svg text { font: 12px system-ui, sans-serif; fill: var(--ink) }
polyline { fill: none; stroke-width: 2 } .thin { stroke-width: 1 } .dashed { stroke-dasharray: 6 4 }
.sample { display: flex; gap: 8px; margin: 6px 0 } .sample img { border-radius: 4px }
.pixels { image-rendering: pixelated }
.wide { overflow-x: auto } table { border-collapse: collapse; font-size: .92em }
td, th { padding: 2px 10px; text-align: left; vertical-align: top; border-bottom: 1px solid var(--faint) }
tr:has(a:target) { background: var(--strong) } .right { color: var(--c2); font-weight: 600 }
.samples td:last-child, .events td:last-child { overflow-wrap: anywhere; min-width: 18em }
@media print { body { max-width: none; font-size: 11px } figure, tr { break-inside: avoid } }
"""
_TIME = (
    "<p>The time of a rank that is in no other piece is waiting for the other part, or for the run loop. In the map a "
    "row that is red throughout is a slow rank; a red column is one slow step.</p>"
)
_MEMORY = "<p>On CPUs device memory is not measured.</p>"
_LEARNING = "<p>A dot leads to the samples of its step.</p>"
