"""OmniBal's table 7 as training runs: data, cuts and memory balanced one after another, on one chain."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from dhp.config.run_dir import read_recorded
from dhp.core.graph import StageGraph
from dhp.observe.metrics import StepMetrics
from dhp.plan.run_plan import plan_run
from dhp.step.schedule import Action, Backward, make_programs
from dhp.step.timed import play

Row = dict[str, Any]
ONE_F_ONE_B = "1f1b"
FULL = ["vision.recompute=full", "text.recompute=full"]
ISF = ["data.balance=isf", "data.packing=true"]
BMP = ["text.partition=bmp", "text.partition_candidates=5", "text.partition_trials=true"]
BUDGET = ["vision.recompute=auto", "text.recompute=auto", "memory.budget_gib=1"]
RANDOM = ["data.balance=random", "data.packing=false", "text.partition=parameters"]
# Each with all that the one before has.
TABLE_7 = {
    "random": [*RANDOM, *FULL],
    "+ data": [*ISF, "text.partition=parameters", *FULL],
    "+ model": [*ISF, *BMP, *FULL],
    "+ memory": [*ISF, *BMP, *BUDGET],
}
PUBLISHED_DAYS = {"random": 61.8, "+ data": 51.9, "+ model": 29.0, "+ memory": 21.3}
SOURCE = "OmniBal (arXiv 2407.20761), table 7: days of a GPU"


def training_row(way: str, run_dir: Path, actions: Sequence[Row], metrics: Sequence[StepMetrics], warm: int) -> Row:
    """The row of a run. actions: what ranks wrote. warm: first steps that do not count."""
    config = read_recorded(run_dir / "config.yaml")
    graph = plan_run(config).graph
    count = config.training.batch_size // config.training.micro_batch_size // (config.text.data or 1)
    counted = metrics[warm:]
    replayed = list(replays(graph, actions, count, len(metrics)))[warm:]
    tokens = sum(one.tokens for one in counted) / 1000
    return {
        "row": "training", "way": way, "steps": len(counted), "tokens": round(tokens * 1000),
        "replay_s": round(sum(replayed) / tokens, 4), "wall_s": round(sum(one.step_s for one in counted) / tokens, 4),
        "pad": round(median(one.pad_ratio for one in counted), 3),
        "layers": {part: [len(stage.layers) for stage in graph.of_part(part)] for part in graph.parts()},
        "published_days": PUBLISHED_DAYS[way], "source": SOURCE,
    }  # fmt: skip


def replays(graph: StageGraph, actions: Sequence[Row], count: int, steps: int) -> Iterator[float]:
    """Seconds of each step on devices of their own: the programs of a run, each action as long as it was on its core.
    Pictures are shared out over replicas, so that a micro-batch waits for the slowest of the tower's ranks; the
    decoder's replicas wait for each other where a step ends."""
    programs = make_programs(ONE_F_ONE_B, graph, count)
    of_rank: dict[tuple[str, int, bool], list[float]] = {}
    for one in actions:
        of_rank.setdefault((one["stage"], one["rank"], one["back"]), []).append(one["seconds"])
    if counts := {len(own) for own in of_rank.values()} - {steps * count}:
        raise ValueError(f"ranks wrote of {sorted(counts)} passes of a kind, and each has {steps * count}")
    replicas = 1 + max(rank for _, rank, _ in of_rank)
    for step in range(steps):
        seconds = (_Seconds(of_rank, step * count, replica) for replica in range(replicas))
        yield max(play(programs, graph, one).step_s for one in seconds)


class _Seconds:
    """Of the actions of one step and replica."""

    def __init__(self, of_rank: Mapping[tuple[str, int, bool], Sequence[float]], first: int, replica: int):
        self._of_rank, self._first, self._replica = of_rank, first, replica

    def __call__(self, action: Action) -> float:
        stage, back = action.node.stage, isinstance(action, Backward)
        at = self._first + action.micro_batch
        if stage.startswith("text"):
            return self._of_rank[stage, self._replica, back][at]
        return max(own[at] for key, own in self._of_rank.items() if (key[0], key[2]) == (stage, back))
