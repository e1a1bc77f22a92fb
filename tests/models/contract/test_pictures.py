"""Pictures on their way: nothing of what an image processor gave is lost or rounded twice."""

from __future__ import annotations

import numpy as np
import torch

from dhp.models.contract.pictures import arrays_of, pack, unpack


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
