"""Tables of results/nullcuda.jsonl as the page has them: `python -m tests.nullcuda.tables` prints them."""

from collections import Counter
from collections.abc import Iterator, Mapping

from tests.helpers.figures import cells, rows
from tests.nullcuda.causes import CAUSES

PASSES = ("forward", "backward")
PAIRS = (("none", "nothing"), ("none", "kernels"), ("none", "layers"), ("light", "nothing"), ("light", "kernels"))
SAMPLES = 4


def runs() -> Iterator[str]:
    """A line for each layout: by stage, launches and calls of a step, and where the host waits in its micro-batches."""
    yield from _head("layout", "GPUs", "groups", "between parts", "launches", "library calls", "waits in micro-batches")
    for row in rows("nullcuda"):
        if "layout" not in row:
            continue
        stages = row["stages"]
        nodes = f" on {row['nodes']} nodes" if row["nodes"] > 1 else ""
        waits = Counter[str]()
        for of in stages.values():
            waits |= inside(of["waits"])
        yield cells(
            row["layout"], f"{row['gpus']}{nodes}", row["backend"], row["transport"],
            ", ".join(f"{name} {of['launches']:,}" for name, of in stages.items()),
            ", ".join(f"{name} {of['library_calls']:,}" for name, of in stages.items()),
            ", ".join(f"{kind} {count}" for kind, count in sorted(waits.items())) or "none",
        )  # fmt: skip


def inside(places: Mapping[str, int]) -> Counter[str]:
    """Waits in the micro-batches of a step, by who waits."""
    found: Counter[str] = Counter()
    for place, count in places.items():
        phase, _, where = place.partition(": ")
        if phase in PASSES:
            found[_who(where)] += count
    return found


def _who(where: str) -> str:
    named = {
        "cluster/": "hand-over",
        "parallel/optim/zero.py": "DeepSpeed",
        "parallel/device.py": "bound on copies",
        "parallel/expert/": "experts",
    }
    return next((name for begin, name in named.items() if where.startswith(begin)), "gloo")


def depth() -> Iterator[str]:
    """A line for each case at full depth, in GB."""
    yield from _head("part", "bytes a parameter", "compiled", "samples", "recompute", "states", "planned", "peak",
                     "planned", "launches", "of the update")  # fmt: skip
    for row in rows("nullcuda"):
        if "part" in row:
            yield cells(
                row["part"], row["state_bytes"], row["compiled"], row["samples"], row["recompute"],
                *(f"{row[name] / 1e9:.2f}" for name in
                  ("between_steps_bytes", "planned_states_bytes", "peak_bytes", "planned_peak_bytes")),
                row["launches"], row["update_launches"],
            )  # fmt: skip


def causes() -> Iterator[str]:
    """A line for each cause: launches of a micro-batch of both parts."""
    yield from _head("launches", *(f"{recompute}, compiled: {compiled}" for recompute, compiled in PAIRS))
    found = [_by_cause(recompute, compiled) for recompute, compiled in PAIRS]
    for cause in (*(name for name, _ in CAUSES), "other"):
        if any(of[cause] for of in found):
            yield cells(cause, *(of[cause] for of in found))
    yield cells("all", *(of.total() for of in found))


def _by_cause(recompute: str, compiled: str) -> Counter[str]:
    found: Counter[str] = Counter()
    for row in rows("nullcuda", samples=SAMPLES, recompute=recompute, compiled=compiled, state_bytes=18):
        for of_pass in row["by_cause"].values():
            found.update(of_pass)
    return found


def _head(*names: str) -> Iterator[str]:
    yield cells(*names)
    yield f"|{' --- |' * len(names)}"


if __name__ == "__main__":
    for table in (runs, depth, causes):
        print(*table(), sep="\n", end="\n\n")
