"""Files of shards, their tensors, regions and other sources."""

import json
import random
from itertools import product
from math import prod
from pathlib import Path
from zlib import crc32

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from dhp.checkpoint import shard_reader
from dhp.checkpoint.shard_files import RegionBlock, blocks_of_range, overlap, whole
from dhp.checkpoint.shard_reader import ShardReader, load_shards, mapped_shards, open_source, read_shards
from dhp.checkpoint.shard_writer import NAMES, ShardWriter, checksum_of, join, save_shards, write_tensors
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


@pytest.mark.parametrize("shape", [(), (1,), (5,), (2, 3), (3, 1, 4), (2, 3, 2, 2), (1, 1), (4, 0)])
def test_each_range_is_its_blocks_one_after_another(shape: tuple[int, ...]) -> None:
    count = prod(shape)
    numbers = torch.arange(count).view(shape)
    for start, stop in product(range(count + 1), repeat=2):
        blocks = blocks_of_range(shape, start, max(0, stop - start))
        found = [int(n) for block in blocks for n in numbers[block.slices(whole(shape))].flatten()]
        assert found == list(range(start, max(start, stop)))
        assert len(blocks) <= max(1, 2 * len(shape) - 1) and all(block.count for block in blocks)


def test_what_two_blocks_have_in_common() -> None:
    one, other = RegionBlock((1, 0), (3, 4)), RegionBlock((2, 2), (5, 5))
    common = one.common(other)
    assert common == RegionBlock((2, 2), (2, 2)) == other.common(one)
    assert common.slices(one) == (slice(1, 3), slice(2, 4)) and common.slices(other) == (slice(0, 2), slice(0, 2))
    assert one.common(RegionBlock((4, 0), (1, 1))) is None
    assert RegionBlock((), ()).common(RegionBlock((), ())) == RegionBlock((), ())


def test_blocks_that_share_an_element_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [RegionBlock((n, 0), (1, 4)) for n in range(4)]
    assert not overlap(rows) and not overlap([]) and not overlap(rows[:1])
    assert overlap([*rows, RegionBlock((2, 3), (1, 1))]) and overlap([RegionBlock((), ()), RegionBlock((), ())])
    assert not overlap([*rows, RegionBlock((0, 0), (0, 4))])  # one without elements
    monkeypatch.setattr("dhp.checkpoint.shard_files._PAIRS", 2)
    assert overlap([*rows, rows[1]]) and not overlap(rows)


@pytest.mark.parametrize("lengths", [(0, 0), (0, 5), (5, 0), (1, 1), (3, 1000), (70_001, 65_536), (4, 2**20 + 3)])
def test_joined_checksums_are_those_of_the_bytes_together(lengths: tuple[int, int]) -> None:
    source = random.Random(sum(lengths))
    first, second = (source.randbytes(length) for length in lengths)
    assert join(crc32(first), crc32(second), len(second)) == crc32(first + second)


def test_the_library_reads_every_format_that_is_written(tmp_path: Path) -> None:
    source = torch.Generator().manual_seed(0)
    values = torch.randint(0, 120, (3, 5), generator=source)
    tensors = {f"{name} of several": values.to(dtype) for dtype, name in NAMES.items()}
    tensors |= {"none": torch.empty(0, 4), "one": torch.tensor(7.0), "turned": values.float().t(), "ü/ß": torch.ones(3)}
    written, sums = write_tensors(tensors, tmp_path / "a.safetensors")
    content = (tmp_path / "a.safetensors").read_bytes()
    assert (written.name, written.nbytes, written.crc32) == ("a.safetensors", len(content), crc32(content))
    found = load_file(tmp_path / "a.safetensors")
    assert found.keys() == tensors.keys() == sums.keys()
    for name, tensor in tensors.items():
        same = found[name].view(torch.uint8) if tensor.ndim else found[name]
        assert found[name].dtype == tensor.dtype and torch.equal(same, _bytes(tensor))
        assert sums[name] == checksum_of(found[name])


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8) if tensor.ndim else tensor


def test_large_tensors_are_summed_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dhp.checkpoint.shard_writer._CHUNK", 7)
    tensors = {"a": torch.arange(100.0), "b": torch.arange(5, dtype=torch.int8)}
    written, sums = write_tensors(tensors, tmp_path / "a.safetensors")
    assert written.crc32 == crc32((tmp_path / "a.safetensors").read_bytes())
    assert sums == {name: crc32(values.numpy().tobytes()) for name, values in tensors.items()}


class OneFile:
    """A form of its own: tensors that torch saved whole, in one file."""

    def __init__(self, folder: Path) -> None:
        self._tensors = torch.load(folder / "weights.pt", weights_only=True)

    @staticmethod
    def holds(folder: Path) -> bool:
        return (folder / "weights.pt").is_file()

    @property
    def names(self) -> list[str]:
        return list(self._tensors)

    def whole(self, name: str) -> Tensor:
        return self._tensors[name]

    def like(self, name: str, held: Tensor) -> Tensor:
        return self._tensors[name]

    def flat(self, name: str, start: int, count: int) -> Tensor:
        return self._tensors[name].flatten()[start : start + count]

    def block(self, name: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        return self._tensors[name][tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))]


def test_pieces_of_ranks_are_read_by_their_reader(tmp_path: Path) -> None:
    save_shards({"a": torch.arange(4.0)}, tmp_path, 0)
    assert isinstance(open_source(tmp_path), ShardReader)


def test_another_form_is_another_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"a": torch.arange(4.0)}, tmp_path / "weights.pt")
    with pytest.raises(CheckpointError, match=r"holds no rank_\*\.json"):
        open_source(tmp_path)
    monkeypatch.setattr(shard_reader, "READERS", [*shard_reader.READERS, OneFile])
    held = {"a": torch.zeros(4)}
    load_shards(held, tmp_path)
    assert held["a"].tolist() == [0.0, 1.0, 2.0, 3.0] == read_shards(tmp_path)["a"].tolist()


def _anonymous(folder: Path, beside: Path) -> int:
    """Bytes of memory that no file stands behind, before and after the tensors were put together."""
    read = lambda: next(int(x.split()[1]) for x in open("/proc/self/status") if x.startswith("RssAnon")) << 10
    before = read()
    found = mapped_shards(folder, beside, most=8 << 20)
    after = read()
    assert sum(tensor.nbytes for tensor in found.values()) == 8 * (8 << 20)
    return after - before


def test_tensors_are_mapped_not_held(tmp_path: Path) -> None:
    """Of two ranks' pieces new files are made; what one rank has whole is read where it lies."""
    (tmp_path / "beside").mkdir()
    for rank in range(2):
        writer = ShardWriter(tmp_path / "text", rank)
        for number in range(4):
            half = torch.arange(float(1 << 20)) + (rank << 20) + number
            writer.add_flat(f"cut.{number}", half, rank << 20, (2, 1 << 20))
            writer.add(f"whole.{number}", torch.full((1 << 21,), float(number)))
        writer.write()
    [grown] = run_on_ranks(_anonymous, 1, tmp_path / "text", tmp_path / "beside")
    assert grown < 40 << 20  # of 64 MiB; 8 at a time, and what the libraries take
    found = mapped_shards(tmp_path / "text", tmp_path / "beside")
    expected = read_shards(tmp_path / "text")
    assert list(found) == list(expected) and all(torch.equal(found[name], expected[name]) for name in expected)
