"""Canaries: torch's private names are what dhp takes them for, and stand in one file."""

import re
import time
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.distributed_c10d import _set_pg_timeout, _world
from torch.distributed.tensor import Shard
from torch.optim import Muon

from dhp.core import torch_private

ROOT = Path(__file__).parents[2]


def test_they_stand_in_one_file() -> None:
    private = re.compile(
        r"\btorch\._[A-Za-z]|from torch[\w.]*\._|import _[A-Z]?\w*Shard|_set_pg_timeout|_world\b(?=.*c10d)"
    )
    found = [str(file.relative_to(ROOT)) for file in (ROOT / "dhp").rglob("*.py") if private.search(file.read_text())]
    assert found == ["dhp/core/torch_private.py"]


def test_what_says_whether_a_fork_may_use_gpus_is_there() -> None:
    assert torch.cuda._is_compiled() == (torch.version.cuda is not None) and not torch.cuda._is_in_bad_fork()
    assert callable(torch.cuda._device_count_nvml)
    assert torch_private.forks_may_use_gpus()  # nothing in these processes asks a driver


def test_a_driver_that_does_not_answer_a_fork_is_waited_for_no_longer_than_a_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "_is_compiled", lambda: True)
    monkeypatch.setattr(torch.cuda, "_device_count_nvml", lambda: time.sleep(600))
    monkeypatch.setattr(torch_private, "_ANSWER_S", 1)
    assert not torch_private.forks_may_use_gpus()


def test_few_kernels_do_what_many_do() -> None:
    tensors = [torch.tensor([3.0, 4.0]), torch.tensor([5.0])]
    norms = torch_private.norms_of(tensors, torch.float64)
    assert [one.item() for one in norms] == [5.0, 5.0] and norms[0].dtype == torch.float64
    torch_private.scale_each(tensors, 2.0)
    assert [one.tolist() for one in tensors] == [[6.0, 8.0], [10.0]]
    into = [torch.zeros(2), torch.zeros(1)]
    torch_private.copy_each(into, tensors)
    assert [one.tolist() for one in into] == [[6.0, 8.0], [10.0]]


def test_pieces_of_a_placement_are_those_of_its_ranks() -> None:
    pieces = torch_private.split_tensor(Shard(0), torch.arange(5), 2)
    assert [one.tolist() for one in pieces] == [[0, 1, 2], [3, 4]]
    strided = torch_private.StridedShard(0, split_factor=2)  # of two fused matrices, a half of each
    assert [one.tolist() for one in torch_private.split_tensor(strided, torch.arange(8), 2)] == [
        [0, 1, 4, 5],
        [2, 3, 6, 7],
    ]


def test_what_must_hold_is_required_later() -> None:
    torch_private.require_later(torch.tensor(True), "it does")
    with pytest.raises(RuntimeError, match="it does not"):
        torch_private.require_later(torch.tensor(False), "it does not")


def test_hooks_in_force_are_seen() -> None:
    assert torch_private.saved_tensor_hooks() is None
    with saved_tensors_hooks(pack := lambda one: one, unpack := lambda one: one):
        assert torch_private.saved_tensor_hooks() == (pack, unpack)


def test_a_view_of_a_parameter_is_known() -> None:
    weight = nn.Parameter(torch.zeros(4, 2))
    assert torch_private.is_view_of_parameter(weight[1:]) and not torch_private.is_view_of_parameter(torch.zeros(2)[:1])


def test_buffers_that_are_saved() -> None:
    module = nn.Module()
    module.register_buffer("saved", torch.ones(1))
    module.register_buffer("made", torch.ones(1), persistent=False)
    assert list(torch_private.persistent_buffers(module)) == ["saved"]


def test_muons_step_is_made_of_its_pieces() -> None:
    """One step from nothing: the orthogonalized momentum by the adjusted rate."""
    weight, gradient = nn.Parameter(torch.zeros(3, 2)), torch.tensor([[1.0, 0.5], [0.0, 2.0], [1.0, 1.0]])
    weight.grad = gradient.clone()
    muon = Muon([weight], lr=0.1, weight_decay=0.0)
    muon.step()
    group = muon.param_groups[0]
    moved = gradient.lerp(gradient * (1 - group["momentum"]), group["momentum"])  # Nesterov's, from a momentum of 0
    step = torch_private.orthogonalize(moved, group["ns_coefficients"], group["ns_steps"], group["eps"])
    rate = torch_private.muon_rate(0.1, group["adjust_lr_fn"], weight.shape)
    assert torch.allclose(weight.detach(), -rate * step.to(weight.dtype), atol=1e-2)


def test_the_rest_has_its_names() -> None:
    assert callable(_set_pg_timeout) and hasattr(_world, "pg_map") and torch_private.all_groups() == []
    assert torch_private.keys_behind(torch_private.FRONT_KEY) is not None
    assert callable(torch._C._accelerator_setAllocatorSettings) and callable(torch_private.muon_step)
    assert callable(torch_private.local_shape_and_offset)
    assert {"placement", "mesh_info"} == {one.name for one in fields(torch_private.MeshPlacement)}
    assert "shard_mesh_dim" in {one.name for one in fields(torch_private.ShardingMesh)}


def test_trees_and_dispatch_are_torchs() -> None:
    leaves, form = torch_private.tree_flatten({"a": [1, 2], "b": 3})
    assert (leaves, torch_private.tree_leaves({"a": [1, 2], "b": 3})) == ([1, 2, 3], [1, 2, 3])
    assert torch_private.tree_unflatten([4, 5, 6], form) == {"a": [4, 5], "b": 6}
    assert torch_private.tree_map(str, [1]) == ["1"] and torch_private.tree_map_only(int, str, [1, 2.0]) == ["1", 2.0]
    assert not torch_private.is_traceable_wrapper_subclass(torch.zeros(1))

    class Count(torch_private.TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, function, types, arguments=(), named=None):
            self.calls += 1
            return function(*arguments, **(named or {}))

    with Count() as count:
        torch.zeros(2) + 1
    assert count.calls >= 2


def test_graphs_are_counted_and_what_the_compiler_gives_up() -> None:
    def add(states: torch.Tensor, number: int) -> torch.Tensor:
        return states + number

    torch.compiler.reset()
    before = torch_private.count_graphs()
    compiled = torch.compile(add, backend="eager", dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=2):
        for number in range(4):
            compiled(torch.zeros(2), number)
    made, given_up = torch_private.count_graphs()
    assert made - before[0] == 2 and given_up > before[1]
    torch.compiler.reset()
