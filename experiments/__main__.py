"""`python -m experiments list | run NAME|all [--quick] [arguments …] | index`: what `dhp experiments` starts."""

import json
import sys
import time
from collections.abc import Sequence

from dhp.cli.experiments import read_arguments
from dhp.core.text import did_you_mean, nearest
from experiments.index import PAGE, indexed
from experiments.layouts import chart
from experiments.registry import BY_NAME, EXPERIMENTS, Experiment
from experiments.running import MADE, RESULTS, ROOT, Outcome, run


def main(arguments: Sequence[str]) -> int:
    asked, more = read_arguments(arguments)
    if asked.what == "list":
        print("\n".join(listed()))
        return 0
    if asked.what == "index":
        PAGE.write_text(indexed(PAGE.read_text(encoding="utf-8"), RESULTS), encoding="utf-8")
        chart.main()
        print(f"{PAGE.relative_to(ROOT)}\n{chart.PICTURE.relative_to(ROOT)}")
        return 0
    if asked.name == "all":
        return _run_all(asked.quick, more)
    if asked.name not in BY_NAME:
        hint = did_you_mean([nearest(asked.name, BY_NAME)])
        print(f"{asked.name} is no experiment{hint}\n`dhp experiments list` names all", file=sys.stderr)
        return 2
    experiment = BY_NAME[asked.name]
    if asked.quick and experiment.quick is None:
        print(
            f"{asked.name} has no quick run. Leave --quick out: about {experiment.minutes:g} minutes", file=sys.stderr
        )
        return 2
    outcome = run(experiment, asked.quick, more)
    print(_shown(outcome))
    return outcome.status


def listed() -> list[str]:
    """A line for each experiment, and what the columns are."""
    width = max(map(len, BY_NAME))
    lines = [f"{'name':{width}} {'minutes':>7} {'quick':>5}  {'rows':32} question"]
    for one in EXPERIMENTS:
        quick = f"{one.quick_minutes:g}" if one.quick is not None else "-"
        needs = f" (needs {one.needs})" if one.needs else ""
        lines.append(f"{one.name:{width}} {one.minutes:7g} {quick:>5}  {kept(one):32} {one.question}{needs}")
    return [
        *lines,
        "minutes: estimates for two idle cores. rows: those in results/, with their date and load where known.",
    ]


def kept(experiment: Experiment) -> str:
    """What results/ has of it."""
    file = RESULTS / f"{experiment.result}.jsonl"
    if not file.exists():
        return "none"
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    made = next((row[MADE] for row in rows if MADE in row), None)
    known = "" if made is None else f", {made['date']}, load {made['load'][0]}"
    return f"{len(rows) - (made is not None)} rows{known}"


def _run_all(quick: bool, more: Sequence[str]) -> int:
    if not quick or more:
        print(
            "`run all` is for quick runs, without further arguments: dhp experiments run all --quick", file=sys.stderr
        )
        return 2
    outcomes, ends = list[Outcome](), [time.monotonic()]
    for one in EXPERIMENTS:
        if one.quick is not None:
            print(f"\n{one.name}: {one.question}", flush=True)
            outcomes.append(run(one, True, ()))
            ends.append(time.monotonic())
            print(_shown(outcomes[-1]), flush=True)
    print()
    for outcome, begin, end in zip(outcomes, ends, ends[1:], strict=False):
        print(f"{_state(outcome):11} {end - begin:4.0f} s  {outcome.words}")
    print(f"{len(outcomes)} experiments in {(ends[-1] - ends[0]) / 60:.1f} minutes")
    return next((outcome.status for outcome in outcomes if outcome.status), 0)


def _state(outcome: Outcome) -> str:
    return "failed" if outcome.status else "judged" if outcome.judged else "not judged"


def _shown(outcome: Outcome) -> str:
    where = "" if outcome.file is None else f"\nrows: {outcome.file.relative_to(ROOT)}"
    return outcome.words + where


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
