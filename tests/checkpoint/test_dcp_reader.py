"""torch's distributed checkpoint reads what dhp's ranks wrote."""

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from dhp.checkpoint.dcp_reader import DcpReader
from dhp.checkpoint.shard_writer import ShardWriter
from dhp.core.errors import CheckpointError
from tests.helpers.ranks import run_on_ranks

WEIGHTS = {
    "vision": {"tower.weight": torch.arange(35.0).view(5, 7), "tower.bias": torch.arange(3.0)},
    "text": {
        "head": torch.arange(24.0).view(2, 3, 4).to(torch.bfloat16), "scale": torch.tensor(2.5),
        "whole": torch.arange(6, dtype=torch.int64),
    },
}  # fmt: skip


def write(folder: Path) -> Path:
    """By two ranks of each part: blocks of rows, ranges of elements that begin amid a row, a scalar, whole ones."""
    for rank in range(2):
        vision, text = ShardWriter(folder / "vision", rank), ShardWriter(folder / "text", rank)
        weight = WEIGHTS["vision"]["tower.weight"]
        rows = slice(0, 3) if rank == 0 else slice(3, 5)
        vision.add_block("tower.weight", weight[rows].clone(), (rows.start, 0), (5, 7))
        head = WEIGHTS["text"]["head"].flatten()
        first, last = ((0, 10), (10, 24))[rank]
        text.add_flat("head", head[first:last].clone(), first, (2, 3, 4))
        if rank == 0:
            vision.add("tower.bias", WEIGHTS["vision"]["tower.bias"])
            text.add("scale", WEIGHTS["text"]["scale"])
            text.add("whole", WEIGHTS["text"]["whole"])
        vision.write()
        text.write()
    return folder


def empty_state() -> dict[str, Tensor]:
    return {name: torch.zeros_like(one) for part in WEIGHTS.values() for name, one in part.items()}


def assert_filled(state: dict[str, Tensor]) -> None:
    for part in WEIGHTS.values():
        for name, wanted in part.items():
            assert torch.equal(state[name], wanted) and state[name].dtype == wanted.dtype


def test_plain_tensors_are_filled_in_place(tmp_path: Path) -> None:
    state = empty_state()
    places = {name: one.data_ptr() for name, one in state.items()}
    dcp.load(state, storage_reader=DcpReader(write(tmp_path)), no_dist=True)
    assert_filled(state)
    assert {name: one.data_ptr() for name, one in state.items()} == places


def test_the_pieces_are_told_as_they_lie_in_files(tmp_path: Path) -> None:
    about = DcpReader(write(tmp_path)).read_metadata().state_dict_metadata
    chunks = {name: [(tuple(one.offsets), tuple(one.sizes)) for one in of.chunks] for name, of in about.items()}
    assert chunks["tower.weight"] == [((0, 0), (3, 7)), ((3, 0), (2, 7))]
    assert chunks["head"][:2] == [((0, 0, 0), (1, 2, 4)), ((0, 2, 0), (1, 1, 2))]  # ten elements
    assert about["head"].properties.dtype == torch.bfloat16 and tuple(about["head"].size) == (2, 3, 4)


@pytest.mark.parametrize("part", ["vision", "text"])
def test_a_part_can_be_read_alone(tmp_path: Path, part: str) -> None:
    state = {name: torch.zeros_like(one) for name, one in WEIGHTS[part].items()}
    dcp.load(state, storage_reader=DcpReader(write(tmp_path) / part), no_dist=True)
    assert all(torch.equal(state[name], wanted) for name, wanted in WEIGHTS[part].items())


def test_a_part_is_read_without_its_optimizers_states(tmp_path: Path) -> None:
    states = ShardWriter(write(tmp_path) / "text" / "optimizer", 0)
    states.add("exp_avg", torch.ones(3))
    states.write()
    assert "exp_avg" not in DcpReader(tmp_path / "text").read_metadata().state_dict_metadata
    assert list(DcpReader(tmp_path / "text" / "optimizer").read_metadata().state_dict_metadata) == ["exp_avg"]


def test_a_value_that_is_damaged_is_told(tmp_path: Path) -> None:
    file = write(tmp_path) / "vision" / "rank_00001.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    state = {"tower.bias": torch.zeros(3)}
    dcp.load(state, storage_reader=DcpReader(tmp_path), no_dist=True)  # of another file
    with pytest.raises(dcp.CheckpointException, match="crc32 differs"):
        dcp.load({"tower.weight": torch.zeros(5, 7)}, storage_reader=DcpReader(tmp_path), no_dist=True)


def load_over_ranks(folder: str) -> list[Tensor]:
    mesh, found = init_device_mesh("cpu", (2,)), []
    for placement in (Shard(0), Shard(1), Replicate()):
        state = {"tower.weight": distribute_tensor(torch.zeros(5, 7), mesh, [placement])}
        dcp.load(state, storage_reader=DcpReader(folder))
        found.append(state["tower.weight"].full_tensor())
    return found


def test_tensors_over_other_ranks_get_their_shares(tmp_path: Path) -> None:
    """Five rows over two ranks, seven columns over two, or all of it on both."""
    for found in run_on_ranks(load_over_ranks, 2, str(write(tmp_path))):
        assert all(torch.equal(one, WEIGHTS["vision"]["tower.weight"]) for one in found)


def test_a_tensor_that_says_which_pieces_it_has(tmp_path: Path) -> None:
    """torch's CheckpointableTensor: two pieces of one buffer."""
    if not hasattr(dcp, "CheckpointableTensor"):
        pytest.skip("needs torch 2.14")
    buffer = torch.zeros(4, 7)
    buffer.global_shape, buffer.global_offsets = (5, 7), ((0, 0), (4, 0))
    buffer.local_offsets, buffer.local_sizes = ((0, 0), (2, 0)), ((2, 7), (1, 7))
    dcp.load({"tower.weight": buffer}, storage_reader=DcpReader(write(tmp_path)), no_dist=True)
    wanted = WEIGHTS["vision"]["tower.weight"]
    assert torch.equal(buffer[:2], wanted[:2]) and torch.equal(buffer[2], wanted[4]) and not buffer[3].any()


def test_what_is_missing_is_told(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no tensors as dhp writes them"):
        DcpReader(tmp_path)
    assert not DcpReader.validate_checkpoint_id(tmp_path)
    folder = write(tmp_path)
    assert DcpReader.validate_checkpoint_id(folder)
    (folder / "vision" / "rank_00001.json").unlink()
    with pytest.raises(CheckpointError, match="the pieces of tower.weight hold 21 values of the 35"):
        DcpReader(folder).read_metadata()
    with pytest.raises(dcp.CheckpointException):  # what torch alone would have left as it was
        dcp.load(empty_state(), storage_reader=DcpReader(folder), no_dist=True)
