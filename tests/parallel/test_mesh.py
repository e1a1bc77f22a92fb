"""The mesh of a part: which ranks an axis joins, and how long they wait for each other."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from dhp.core.axes import MESH, Degrees
from dhp.parallel.comm import build_mesh, neighbours_mesh, replicas_mesh
from tests.helpers.ranks import run_on_ranks

WAIT = timedelta(seconds=77)


def _ranks_and_timeouts() -> tuple[dict[str, list[int]], set[timedelta]]:
    _set_pg_timeout(WAIT, dist.group.WORLD)
    mesh = build_mesh("cpu", Degrees(data=2, tensor=2))
    groups = {axis: mesh.get_group(axis) for axis in MESH} | {"replicas": replicas_mesh(mesh).get_group()}
    waits = {group._get_backend(torch.device("cpu")).options._timeout for group in groups.values()}
    return {axis: dist.get_process_group_ranks(group) for axis, group in groups.items()}, waits


def test_axes_join_their_ranks_and_wait_as_long_as_the_whole_part() -> None:
    """torch gives the groups of a mesh the backend's own timeout, whatever the default group has."""
    answers = run_on_ranks(_ranks_and_timeouts, 4)
    assert [waits for _, waits in answers] == [{WAIT}] * 4
    assert [ranks["tensor"] for ranks, _ in answers] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [ranks["data"] for ranks, _ in answers] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [ranks["replicas"] for ranks, _ in answers] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [ranks["ring"] for ranks, _ in answers] == [[0], [1], [2], [3]]


def _expert_ranks() -> tuple[list[list[int]], set[timedelta]]:
    _set_pg_timeout(WAIT, dist.group.WORLD)
    mesh = neighbours_mesh(build_mesh("cpu", Degrees(data=4, expert=2)), 2, "experts")
    groups = [mesh.get_group(axis) for axis in ("experts", "copies")]
    waits = {group._get_backend(torch.device("cpu")).options._timeout for group in groups}
    return [dist.get_process_group_ranks(group) for group in groups], waits


def test_neighbours_share_out_experts_and_every_second_one_has_the_same() -> None:
    answers = run_on_ranks(_expert_ranks, 4)
    assert [waits for _, waits in answers] == [{WAIT}] * 4
    assert [ranks for ranks, _ in answers] == [[[0, 1], [0, 2]], [[0, 1], [1, 3]], [[2, 3], [0, 2]], [[2, 3], [1, 3]]]
