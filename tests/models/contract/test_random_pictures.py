"""Pictures on their way: nothing of what an image processor gave is lost or rounded twice."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dhp.models.contract.random_pictures import arrays_of, frame_patches, pack, unpack


def test_arguments_come_back_as_they_were() -> None:
    random = np.random.default_rng(0)
    picture = {
        "pixel_values": random.standard_normal((1, 3, 5, 7)).astype(np.float32),
        "image_sizes": np.array([[5, 7]]),
        "pixel_attention_mask": random.integers(0, 2, (1, 5, 7)).astype(bool),
        "high_resolution": random.standard_normal((2, 11)).astype(np.float32),
        "left_out": None,
    }
    rows, form = pack(picture, tokens=4, values=8, written="<image>")
    assert rows.shape == (-(-(3 * 5 * 7 + 22) // 8), 8) and rows.dtype == np.float32
    assert (form.rows, form.tokens, form.written) == (len(rows), 4, "<image>")
    assert hash(form) == hash(pack(picture, tokens=4, values=8, written="<image>")[1])
    back = unpack(form, torch.from_numpy(rows), torch.float64)
    assert back.keys() == picture.keys() - {"left_out"}
    for name, tensor in back.items():
        assert np.array_equal(tensor.numpy(), picture[name]), name
    assert back["pixel_values"].dtype == torch.float64 and back["image_sizes"].dtype == torch.int64
    assert set(arrays_of(form)) == {"image_sizes", "pixel_attention_mask"}


def test_a_mask_that_hides_nothing_takes_no_room() -> None:
    pixels = np.zeros((1, 2, 3, 64, 64), np.float32)
    _, form = pack({"pixel_values": pixels, "pixel_attention_mask": np.ones((1, 2, 64, 64), np.int64)}, 4, 8)
    assert sum(len(raw) for *_, raw in form.arrays) == 8
    assert np.array_equal(arrays_of(form)["pixel_attention_mask"], np.ones((1, 2, 64, 64), np.int64))


@pytest.mark.parametrize(
    ("picture", "patches"),
    [
        ({"pixel_values": (1, 5, 3, 28, 28)}, (16,) * 5),
        ({"pixel_values": (1, 3, 14, 49)}, (14,)),
        ({"pixel_values": (1, 3, 30, 28)}, (16,)),  # as convolutions do, without what is less than a patch
        ({"pixel_values": (1, 3, 28, 28), "pixel_values_local": (2, 3, 14, 14)}, (16, 4, 4)),
        ({"pixel_values": (24, 147), "image_grid_thw": [[1, 4, 6]]}, (24,)),
        ({"pixel_values": (24, 3, 7, 7), "image_grid_hw": [[4, 6]]}, (24,)),
        ({"pixel_values": (24, 147), "image_grid_thw": [[2, 2, 4], [1, 2, 4]]}, (8, 8, 8)),
        ({"pixel_values": (1, 16, 147), "spatial_shapes": [[4, 2]]}, (16,)),  # filled up to as many rows
        ({"pixel_values": (1, 6, 28, 28)}, (32,)),
    ],
)
def test_patches_of_each_tile(picture: dict[str, tuple[int, ...] | list[list[int]]], patches: tuple[int, ...]) -> None:
    """Patches of 3 × 7 × 7 values."""
    arrays = {n: np.zeros(v, np.float32) if isinstance(v, tuple) else np.array(v) for n, v in picture.items()}
    _, form = pack(arrays, tokens=4, values=147)
    assert frame_patches(form, 3, 7) == patches
