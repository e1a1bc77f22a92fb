"""Shards on disk, and whole weights back from them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from dhp.checkpoint.shards import read_shards, save_shards
from dhp.errors import CheckpointError
from tests.helpers.ranks import run_on_ranks


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5))


def _save_sharded(folder: Path) -> tuple[str, ...]:
    mesh = init_device_mesh("cpu", (2,))
    model = _model()
    for name, dim in (("weight", 0), ("bias", 0)):
        whole = getattr(model[0], name)
        setattr(model[0], name, nn.Parameter(distribute_tensor(whole.detach(), mesh, [Shard(dim)])))
    return save_shards(model, folder, mesh.get_local_rank())


def test_pieces_of_two_ranks_make_the_whole(tmp_path: Path) -> None:
    run_on_ranks(_save_sharded, 2, tmp_path)
    whole = read_shards(tmp_path)
    expected = dict(_model().named_parameters())
    assert whole.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(whole[name], weight)
    places = [json.loads((tmp_path / f"rank_0000{r}.json").read_text()) for r in (0, 1)]
    assert places[0]["0.weight"] == {"shape": [5, 6], "offset": [0, 0]}
    assert places[1]["0.weight"] == {"shape": [5, 6], "offset": [3, 0]}  # 5 rows over 2 ranks: 3 and 2
    assert "1.weight" in places[0] and "1.weight" not in places[1]  # what all hold is written once


def _save_fused(folder: Path) -> tuple[str, ...]:
    mesh, model = init_device_mesh("cpu", (2,)), nn.Linear(3, 8, bias=False)
    halves = distribute_tensor(torch.arange(24.0).view(8, 3), mesh, [_StridedShard(0, split_factor=2)])
    model.weight = nn.Parameter(halves)
    assert halves.to_local()[:, 0].tolist() == ([0, 3, 12, 15], [6, 9, 18, 21])[mesh.get_local_rank()]
    return save_shards(model, folder, mesh.get_local_rank())


def test_a_fused_weight_of_which_each_rank_holds_a_slice_of_both_halves(tmp_path: Path) -> None:
    run_on_ranks(_save_fused, 2, tmp_path)
    assert torch.equal(read_shards(tmp_path)["weight"], torch.arange(24.0).view(8, 3))


@pytest.mark.parametrize("place", [{"offset": [4, 0]}, {"shape": [9, 6]}], ids=["beyond the end", "another weight"])
def test_a_piece_that_does_not_fit(tmp_path: Path, place: dict[str, list[int]]) -> None:
    run_on_ranks(_save_sharded, 2, tmp_path)
    file = tmp_path / "rank_00001.json"
    places = json.loads(file.read_text())
    places["0.weight"] |= place
    file.write_text(json.dumps(places))
    with pytest.raises(CheckpointError, match=r"0\.weight: a piece of shape \[2, 6\] .* does not fit .*\[5, 6\]"):
        read_shards(tmp_path)


def test_a_lost_piece_is_noticed(tmp_path: Path) -> None:
    run_on_ranks(_save_sharded, 2, tmp_path)
    for file in tmp_path.glob("rank_00001.*"):
        file.unlink()
    with pytest.raises(CheckpointError, match="0.weight hold 18 values, but its shape .* has 30"):
        read_shards(tmp_path)


def test_weights_missing_beside_their_places(tmp_path: Path) -> None:
    save_shards(_model(), tmp_path, 0)
    (tmp_path / "rank_00000.safetensors").unlink()
    with pytest.raises(CheckpointError, match="rank_00000.safetensors is missing"):
        read_shards(tmp_path)


def test_an_empty_directory_is_no_part(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no part of a checkpoint"):
        read_shards(tmp_path)
