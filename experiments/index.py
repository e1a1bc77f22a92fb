"""The table of EXPERIMENTS.md: of each experiment its question and the sentence of its rows in results/."""

import json
from pathlib import Path

from experiments.declared import FIGURES
from experiments.figures import sentence
from experiments.marks import put_between
from experiments.registry import EXPERIMENTS, Experiment
from experiments.running import MADE

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "experiments" / "EXPERIMENTS.md"
BEGIN, END = "<!-- sentences: begin -->", "<!-- sentences: end -->"


def indexed(page: str, results: Path) -> str:
    """The page with the table as the rows in `results` have it. Raises ValueError for a page without its place."""
    lines = [f"| [{one.name}]({one.name}/README.md) | {one.question} | {_words(one, results)} |" for one in EXPERIMENTS]
    table = "\n".join(["| experiment | question | what its rows say |", "|---|---|---|", *lines])
    return put_between(page, BEGIN, END, table)


def _words(one: Experiment, results: Path) -> str:
    file = results / f"{one.result}.jsonl"
    if not file.exists():
        return "no rows yet."
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return sentence(FIGURES.get(one.name, ()), [row for row in rows if MADE not in row]) or "no sentence yet."
