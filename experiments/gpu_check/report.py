"""`python -m experiments.gpu_check.report [results/gpu.jsonl]`: what a run of the check found, for people.

The latest run's rows go to `gpu.json` beside the file, its figures to the table of docs/performance.md. Without rows of
a GPU the page says that nothing was measured."""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from experiments.marks import put_between

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "performance.md"
BEGIN, END = "<!-- gpu_check: begin -->", "<!-- gpu_check: end -->"
NOTHING = "Not measured yet."

Row = dict[str, Any]


def _percent(value: float) -> str:
    return f"{100 * value:.1f}%"


def _gigabytes(value: float) -> str:
    return f"{value / 1e9:.2f} GB"


# By field of a row: what it is called, and how its value is written.
FIGURES: dict[str, tuple[str, Callable[[Any], str]]] = {
    "step_ms": ("ms a step", "{:.1f}".format), "mfu": ("MFU", _percent), "tokens_per_s": ("tokens/s", "{:,.0f}".format),
    "reserved_bytes": ("reserved", _gigabytes),
    "between_steps_bytes": ("between steps", _gigabytes), "dry_run_most_bytes": ("dry run", _gigabytes),
    "dry_run_bytes": ("dry run without activations", _gigabytes), "idle_percent": ("idle", "{:.1f}%".format),
    "copies_hidden_percent": ("copies hidden", "{:.0f}%".format), "launches": ("launches", "{:,}".format),
    "send_ms": ("ms to send", "{:.2f}".format), "take_ms": ("ms to take", "{:.2f}".format),
    "send_gb_s": ("GB/s sent", "{:.1f}".format), "used_bytes": ("of the device", _gigabytes),
    "peak_bytes": ("activations' peak", _gigabytes), "peak_error": ("peak to the plan's", "{:+.1%}".format),
    "prefill_ms": ("ms to the first token", "{:.0f}".format), "ms_a_token": ("ms a token", "{:.2f}".format),
    "loss_error": ("losses off by at most", "{:.1g}".format), "killed_after": ("killed after step", "{}".format),
    "by_ray_to_engines": ("by Ray to the engines alone", "{:.3f}".format),
    "by_ray_to_plain": ("by Ray to plain", "{:.3f}".format), "engines_to_plain": ("engines to plain", "{:.3f}".format),
    "host_us": ("µs a launch", "{:.2f}".format), "device_gb_s": ("GB/s in the device", "{:.0f}".format),
    "to_device_gb_s": ("to it", "{:.1f}".format), "to_host_gb_s": ("from it", "{:.1f}".format),
    "count": ("waits", "{}".format), "equal": ("equal bits", "{}".format), "loss": ("loss", "{:.2g}".format),
    "update": ("update", "{:.2g}".format), "proof_s": ("s to prove", "{:.1f}".format),
    "forward_ms": ("ms forward", "{:.3f}".format), "backward_ms": ("ms backward", "{:.3f}".format),
    "fused_ms": ("ms fused", "{:.3f}".format), "own_ms": ("ms the model's own", "{:.3f}".format),
}  # fmt: skip


def read_latest(file: Path) -> list[Row]:
    """The rows of the last run in the file, of each the one written last, in their order."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    rows = [json.loads(line) for line in lines]
    latest = {(row["section"], row["row"]): row for row in rows if row["run"] == rows[-1]["run"]}
    return list(latest.values())


def as_json(rows: Sequence[Row]) -> str:
    """Rows by section."""
    sections: dict[str, list[Row]] = {}
    for row in rows:
        sections.setdefault(row["section"], []).append({k: v for k, v in row.items() if k not in ("run", "section")})
    return json.dumps({"run": rows[-1]["run"], "sections": sections}, indent=1) + "\n"


def table(rows: Sequence[Row]) -> str:
    """What stands between the marks of the page."""
    machine = next((row for row in rows if row["row"] == "machine"), None)
    if machine is None or machine.get("device", "cpu") == "cpu":
        return NOTHING
    head = f"{machine['device']}, driver {machine['driver']}, torch {machine['torch']}, run of {rows[-1]['run'][:10]}."
    lines = [f"{head} Random weights; all rows in `results/gpu.json`.", "", "| section | row | | figures |"]
    lines.append("|---|---|---|---|")
    for row in rows:
        if row["section"] not in ("probe", "end"):
            lines.append(f"| {row['section']} | {row['row']} | {_verdict(row)} | {_figures(row)} |")
    return "\n".join(lines)


def with_table(page: str, rows: Sequence[Row]) -> str:
    """The page with this table in it. Raises ValueError for a page without the marks."""
    return put_between(page, BEGIN, END, table(rows))


def _verdict(row: Row) -> str:
    if "error" in row:
        return "failed"
    for name in ("skipped", "no time"):
        if name in row:
            return name
    if row.get("fits") is False:
        return "does not fit"
    return "right" if row["ok"] else "deviates"


def _figures(row: Row) -> str:
    """Those that the row has; of a failure its first line."""
    if "error" in row:
        return str(row["error"]).partition("\n")[0][:100].replace("|", "/")
    if "skipped" in row:
        return str(row["skipped"])
    found = ((name, write(row[key])) for key, (name, write) in FIGURES.items() if row.get(key) is not None)
    return ", ".join(f"{name} {value}" for name, value in found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?", default=ROOT / "results" / "gpu.jsonl")
    parser.add_argument("--page", type=Path, default=PAGE, help="a page with the marks between which the table goes")
    given = parser.parse_args()
    rows = read_latest(given.file)
    if rows:
        given.file.with_suffix(".json").write_text(as_json(rows), encoding="utf-8")
    page = given.page.read_text(encoding="utf-8")
    given.page.write_text(with_table(page, rows), encoding="utf-8")
    print(table(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
