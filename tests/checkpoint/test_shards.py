"""Shards on disk, and whole weights back from them."""

from __future__ import annotations

import json
from pathlib import Path
from zlib import crc32

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from dhp.checkpoint.shard_reader import ShardReader, load_shards, read_shards
from dhp.checkpoint.shard_writer import ShardWriter, save_shards
from dhp.core.errors import CheckpointError
from tests.helpers.ranks import run_on_ranks


def named(module: nn.Module) -> dict[str, nn.Parameter]:
    return dict(module.named_parameters())


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5))


def _save_sharded(folder: Path) -> tuple[str, ...]:
    mesh = init_device_mesh("cpu", (2,))
    model = _model()
    for name, dim in (("weight", 0), ("bias", 0)):
        whole = getattr(model[0], name)
        setattr(model[0], name, nn.Parameter(distribute_tensor(whole.detach(), mesh, [Shard(dim)])))
    return save_shards(named(model), folder, mesh.get_local_rank())


def test_pieces_of_two_ranks_make_the_whole(tmp_path: Path) -> None:
    run_on_ranks(_save_sharded, 2, tmp_path)
    whole = read_shards(tmp_path)
    expected = dict(_model().named_parameters())
    assert whole.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(whole[name], weight)
    extents = [json.loads((tmp_path / f"rank_0000{r}.json").read_text()) for r in (0, 1)]
    sums = [crc32(piece.detach().numpy().tobytes()) for piece in expected["0.weight"].split(3)]
    assert extents[0]["0.weight"] == {"shape": [5, 6], "offset": [0, 0], "dtype": "F32", "crc32": sums[0]}
    assert extents[1]["0.weight"] == {"shape": [5, 6], "offset": [3, 0], "dtype": "F32", "crc32": sums[1]}  # 5: 3 and 2
    assert "1.weight" in extents[0] and "1.weight" not in extents[1]  # what all hold is written once


def _save_fused(folder: Path) -> tuple[str, ...]:
    mesh, model = init_device_mesh("cpu", (2,)), nn.Linear(3, 8, bias=False)
    halves = distribute_tensor(torch.arange(24.0).view(8, 3), mesh, [_StridedShard(0, split_factor=2)])
    model.weight = nn.Parameter(halves)
    assert halves.to_local()[:, 0].tolist() == ([0, 3, 12, 15], [6, 9, 18, 21])[mesh.get_local_rank()]
    return save_shards(named(model), folder, mesh.get_local_rank())


def test_a_fused_weight_of_which_each_rank_holds_a_slice_of_both_halves(tmp_path: Path) -> None:
    run_on_ranks(_save_fused, 2, tmp_path)
    assert torch.equal(read_shards(tmp_path)["weight"], torch.arange(24.0).view(8, 3))


@pytest.mark.parametrize("extent", [{"offset": [4, 0]}, {"shape": [9, 6]}], ids=["beyond the end", "another weight"])
def test_a_piece_that_does_not_fit(tmp_path: Path, extent: dict[str, list[int]]) -> None:
    run_on_ranks(_save_sharded, 2, tmp_path)
    file = tmp_path / "rank_00001.json"
    extents = json.loads(file.read_text())
    extents["0.weight"] |= extent
    file.write_text(json.dumps(extents))
    with pytest.raises(CheckpointError, match=r"0\.weight: a piece of shape \[2, 6\] .* does not fit .*\[5, 6\]"):
        read_shards(tmp_path)


@pytest.mark.parametrize(
    ("shape", "told"),
    [([2**40, 1], "and the files with its pieces"), ([-4, -4], "is damaged"), ([True, 2], "is damaged")],
)
def test_a_shape_that_no_rank_wrote_takes_no_memory(tmp_path: Path, shape: list[int], told: str) -> None:
    save_file({"a": torch.zeros(2, 2)}, tmp_path / "rank_00000.safetensors")
    (tmp_path / "rank_00000.json").write_text(json.dumps({"a": {"shape": shape, "offset": [0, 0]}}))
    with pytest.raises(CheckpointError, match=told):
        read_shards(tmp_path)


def test_a_lost_piece_is_noticed(tmp_path: Path) -> None:
    run_on_ranks(_save_sharded, 2, tmp_path)
    for file in tmp_path.glob("rank_00001.*"):
        file.unlink()
    with pytest.raises(CheckpointError, match="0.weight hold 18 values, but its shape .* has 30"):
        read_shards(tmp_path)


def test_weights_missing_beside_their_places(tmp_path: Path) -> None:
    save_shards(named(_model()), tmp_path, 0)
    (tmp_path / "rank_00000.safetensors").unlink()
    with pytest.raises(CheckpointError, match="rank_00000.safetensors is missing"):
        read_shards(tmp_path)


def test_an_empty_directory_is_no_part(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no part of a checkpoint"):
        read_shards(tmp_path)


def _load_back(folder: Path) -> list[torch.Tensor]:
    """This rank's slices of a row-wise, a column-wise and a fused weight, and of one that both ranks hold."""
    mesh, whole = init_device_mesh("cpu", (2,)), torch.arange(48.0).view(8, 6)
    model = nn.Module()
    ways = {"rows": Shard(0), "columns": Shard(1), "fused": _StridedShard(0, split_factor=2), "same": Replicate()}
    for name, placement in ways.items():
        model.register_parameter(name, nn.Parameter(distribute_tensor(whole, mesh, [placement])))
    model.plain = nn.Parameter(whole.clone())
    kept = [p.detach().clone() for p in model.parameters()]
    save_shards(named(model), folder, mesh.get_local_rank())
    torch.distributed.barrier()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    load_shards(named(model), folder)
    return [(p - k).abs().max() for p, k in zip(map(_local, model.parameters()), map(_local, kept), strict=True)]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def test_every_rank_gets_its_own_slices_back(tmp_path: Path) -> None:
    for apart in run_on_ranks(_load_back, 2, tmp_path):
        assert [float(value) for value in apart] == [0.0] * 5


def test_ranges_of_elements_as_two_ranks_or_any_others_hold_them(tmp_path: Path) -> None:
    whole = torch.arange(12.0).view(3, 4)
    for rank, (first, last) in enumerate([(0, 5), (5, 12)]):
        writer = ShardWriter(tmp_path, rank)
        writer.add_flat("weight", whole.flatten()[first:last], first, (3, 4))
        writer.add("step", torch.tensor(7.0))
        writer.write()
    reader = ShardReader(tmp_path)
    assert torch.equal(reader.whole("weight"), whole) and reader.whole("step") == 7
    assert reader.flat("weight", 5, 7).tolist() == [5, 6, 7, 8, 9, 10, 11]
    assert reader.flat("weight", 3, 4).tolist() == [3, 4, 5, 6]  # no rank wrote this range
    (tmp_path / "rank_00001.json").unlink()
    with pytest.raises(CheckpointError, match=r"the pieces of weight hold 5 values, but its shape \[3, 4\] has 12"):
        ShardReader(tmp_path).flat("weight", 3, 4)


def test_a_block_comes_from_all_pieces_that_it_overlaps(tmp_path: Path) -> None:
    whole = torch.arange(20.0).view(4, 5)
    for rank, (first, last) in enumerate([(0, 1), (1, 4)]):
        writer = ShardWriter(tmp_path, rank)
        writer.add_block("weight", whole[first:last], (first, 0), (4, 5))
        writer.write()
    reader = ShardReader(tmp_path)
    assert reader.block("weight", (0, 2), (3, 2)).tolist() == [[2, 3], [7, 8], [12, 13]]
    assert reader.block("weight", (2, 1), (2, 3)).tolist() == [[11, 12, 13], [16, 17, 18]]


def test_weights_of_another_model(tmp_path: Path) -> None:
    save_shards(named(_model()), tmp_path, 0)
    with pytest.raises(CheckpointError, match=r"0\.weight was saved with shape \[5, 6\], but here it has \[5, 7\]"):
        load_shards(named(nn.Sequential(nn.Linear(7, 5), nn.LayerNorm(5))), tmp_path)
    with pytest.raises(CheckpointError, match=r"holds no weight: the checkpoint is of another model"):
        load_shards(named(nn.Linear(6, 5)), tmp_path)
