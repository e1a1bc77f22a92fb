"""`python -m experiments.layout_choice [--models 7b …] [--devices 8 32] [--tokens 4096 …]`: which layout when.

For each model, number of GPUs and length of a row, the layout that `dhp plan` puts first, a JSON line each; nothing is
trained. `--table results/layout_choice.jsonl` writes the rows as a table into docs/parallelism.md."""

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from dhp.cli.plan_outcome import PlanQuery, find_plan
from dhp.cli.plan_request import read_request
from dhp.cli.plan_table import layout_text
from dhp.config.command_line import compose_config
from dhp.config.devices import GIB
from dhp.core.process import StartUp, say_line
from dhp.plan.search.free_keys import find_held
from experiments.marks import put_between

PAGE = Path(__file__).parents[2] / "docs" / "parallelism.md"
BEGIN, END = "<!-- layout_choice: begin -->", "<!-- layout_choice: end -->"
_HEAD = "| model | H100s | tokens of a row | text | vision | recompute (text; vision) | tokens/s a GPU | MFU | GiB |"
_LONGEST = 24  # characters of a recompute that is written out

Row = dict[str, Any]


def table(rows: Sequence[Row]) -> str:
    """A line for each row that plans something."""
    return "\n".join([_HEAD, "|---|---|---|---|---|---|---|---|---|", *map(_line, (r for r in rows if "fits" in r))])


def with_table(page: str, rows: Sequence[Row]) -> str:
    """The page with this table in it. Raises ValueError for a page without the marks."""
    return put_between(page, BEGIN, END, table(rows))


def _line(row: Row) -> str:
    head = [row["model"].upper(), row["devices"], f"{row['tokens']:,}"]
    if not row["fits"]:
        return _cells([*head, f"nothing fits; {', or '.join(row['instead'][:2])} would", "", "", "", "", ""])
    recompute = "; ".join(_short(row[f"{part}_recompute"]) for part in ("text", "vision"))
    doubt = "" if row["sure"] else "?"
    figures = [f"{row['tokens_s_device']:,}", f"{row['mfu']:.0%}", f"{row['gib']}{doubt}"]
    return _cells([*head, row["text"], row["vision"], recompute, *figures])


def _short(recompute: str) -> str:
    if len(recompute) <= _LONGEST:
        return recompute
    return "mixed: " + ", ".join(dict.fromkeys(one.partition(":")[0] for one in recompute.split(",")))


def _cells(values: Sequence[Any]) -> str:
    return f"| {' | '.join(map(str, values))} |"


MODELS, DEVICES, TOKENS = ("3b", "7b", "32b", "72b"), (8, 32), (4096, 16384, 65536)
TOKENS_A_STEP = 2**20
DEVICE, NODE = "h100", 8


def words_of(model: str, devices: int, tokens: int) -> list[str]:
    """`dhp plan`'s arguments: rows of one sample, half of it a picture, an eighth learned; a million tokens a step."""
    return [
        f"--config-name=qwen2_5_vl_{model}", f"devices={-(-devices // NODE)}x{min(devices, NODE)}", f"device={DEVICE}",
        "free=all", f"length=tokens:{tokens},picture:{tokens // 2},targets:{tokens // 8}", "data.limits.text=null",
        f"training.batch_size={TOKENS_A_STEP // tokens}",
    ]  # fmt: skip


def plan(model: str, devices: int, tokens: int) -> dict[str, Any]:
    """The first layout of the plan; without one, what would fit."""
    name, *words = words_of(model, devices, tokens)
    request, overrides = read_request(words)
    config_name = name.partition("=")[2]
    config = compose_config(config_name, None, overrides)
    held = find_held(config, overrides, request.fix, request.free)
    say = StartUp(perf_counter(), partial(say_line, file=sys.stderr))
    outcome = find_plan(PlanQuery(config, config_name, request, held), say)
    row: dict[str, Any] = {"model": model, "devices": devices, "tokens": tokens, "fits": outcome.best is not None}
    row["command"] = f"dhp plan {shlex.join([name, *words])}"
    if outcome.best is None:
        return row | {"instead": list(outcome.changes)}
    best, used = outcome.best, outcome.used(outcome.best)
    return row | {
        **{part: layout_text(best.settings, part) for part in ("vision", "text")},
        **{f"{part}_recompute": best.settings[f"{part}.recompute"] for part in ("vision", "text")},
        "step_s": round(best.found.step_s, 3), "tokens_s_device": round(best.found.tokens_s / outcome.machine.count),
        "mfu": round(used["total"], 3) if used else None, "gib": round(best.found.peak.total / GIB, 1),
        "sure": outcome.sure(best),
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.layout_choice", description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--devices", nargs="+", type=int, default=DEVICES)
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS)
    parser.add_argument("--table", type=Path, help="a file of rows: write them into the page, and plan nothing")
    given = parser.parse_args(arguments)
    if given.table is not None:
        rows = [json.loads(line) for line in given.table.read_text(encoding="utf-8").splitlines()]
        PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), rows), encoding="utf-8")
        return
    for model in given.models:
        for devices in given.devices:
            for tokens in given.tokens:
                print(json.dumps(plan(model, devices, tokens)), flush=True)


if __name__ == "__main__":
    main()
