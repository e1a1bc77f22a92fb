"""Files of tensors are the library's format, and their checksums those of their bytes."""

from __future__ import annotations

import random
from pathlib import Path
from zlib import crc32

import pytest
import torch
from safetensors.torch import load_file

from dhp.checkpoint.shard_writer import NAMES, checksum_of, join, write_tensors


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
