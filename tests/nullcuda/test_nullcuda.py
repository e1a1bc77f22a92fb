"""Whole runs on null CUDA: set-up, backends, transports, waits, launches and memory; no numbers, for nothing computes.

`make nullcuda`: makes the environment once (`tests.nullcuda.stand_ins`), some 530 MB to fetch. `--nullcuda-rows=FILE`
appends the row of each layout to a file of results, which later runs are held against."""

from pathlib import Path
from typing import Any

import pytest

from dhp.core.graph import part_of
from tests.helpers.figures import rows
from tests.nullcuda.layouts import APART, GLOO, IPC, LAYOUTS, NCCL, Layout
from tests.nullcuda.runs import HANDOVER, MICRO_BATCH, STEPS, Run, row_of, run

DEEPSPEED = "parallel/optim/zero.py"  # whose engine waits by itself

pytestmark = pytest.mark.nullcuda


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_run(name: str, nullcuda: Path, tmp_path: Path, keep_row: Any) -> None:
    layout = LAYOUTS[name]
    ended = run(nullcuda, tmp_path, layout)
    row = row_of(name, layout, ended)
    keep_row(row)
    assert ended.summary["status"] == "completed" and row["steps"] == STEPS
    require_as_wished(layout, ended)
    require_no_wait(layout, ended)
    require_nothing_left(row, ended)
    require_held(row)


def require_as_wished(layout: Layout, ended: Run) -> None:
    """Backend, transport and GPUs, as far as a run shows them."""
    assert ("share a GPU, which NCCL refuses" in ended.printed) == (layout.backend == GLOO)
    chosen = {(lines[-1]["backend"], lines[-1]["transport"]) for lines in ended.ranks.values()}
    assert {(layout.backend in backend, transport) for backend, transport in chosen} == {(True, layout.transport)}
    assert len(ended.accounts) == len(ended.ranks)  # neither the driver nor those who read take a context
    assert {one.device for one in ended.accounts} == set(range(layout.gpus))
    assert all(one.launches for one in ended.accounts)
    opens = any(one.opened for one in ended.accounts)
    assert opens == (layout.transport == IPC or (layout.transport == NCCL and APART not in layout.settings))


def require_no_wait(layout: Layout, ended: Run) -> None:
    """In a micro-batch, but for the hand-over."""
    for lines in ended.ranks.values():
        for line in lines[1:-1]:
            inside = {
                place: count for place, count in line["places"].items() if place.startswith(MICRO_BATCH)
            }  # fmt: skip
            own = {place: count for place, count in inside.items() if f": {HANDOVER}" not in place}
            assert {place for place in own if not any(known in place for known in (DEEPSPEED, *layout.waits))} == set()
            handed = sum(inside.values()) - sum(own.values())
            methods = line["methods"]
            # To send through host memory, for each call; to give mapped memory back, for each tensor received.
            assert handed <= methods["forward_step"] + methods["backward_step"] + methods.get("receive", 0), inside


def require_nothing_left(row: dict[str, Any], ended: Run) -> None:
    """When engines have been let go; DeepSpeed's are held by its own modules until the process ends."""
    for stage, of in row["stages"].items():
        theirs = ended.summary["world"][part_of(stage)].get("zero_engine") == "deepspeed"
        assert theirs or of["left_bytes"] == 0, (stage, of["left_bytes"])


def require_held(row: dict[str, Any]) -> None:
    """No more launches and calls than on record."""
    for recorded in rows("nullcuda", layout=row["layout"]):
        for stage, known in recorded["stages"].items():
            for what in ("launches", "library_calls", "graphs"):
                assert row["stages"][stage][what] <= known[what], (stage, what)
