"""Packs a picture's arguments into rows for sending, and unpacks them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from dhp.base.geometry import ProcessorOutput


def pack(
    picture: Mapping[str, np.ndarray], tokens: int, values: int, written: str = ""
) -> tuple[np.ndarray, ProcessorOutput]:
    """One picture's arguments as rows [rows, values], float32, and its form."""
    kept = {name: np.asarray(array) for name, array in picture.items() if array is not None}
    pixels = {name: array for name, array in kept.items() if array.dtype.kind == "f"}
    others = tuple(
        (name, str(array.dtype), array.shape, _brief(array)) for name, array in kept.items() if name not in pixels
    )
    flat = np.concatenate([np.asarray(array, np.float32).reshape(-1) for array in pixels.values()])
    rows = -(-len(flat) // values)
    whole = np.zeros((rows, values), np.float32)
    whole.reshape(-1)[: len(flat)] = flat
    return whole, ProcessorOutput(
        tuple((name, array.shape) for name, array in pixels.items()), others, rows, tokens, written
    )


def _brief(array: np.ndarray) -> bytes:
    """An array's bytes; of one that is the same everywhere, as the mask of a whole tile, those of one element."""
    flat = array.reshape(-1)
    same = flat.size > 1 and bool((flat == flat[0]).all())
    return flat[:1].tobytes() if same else array.tobytes()


def arrays_of(form: ProcessorOutput) -> dict[str, np.ndarray]:
    """The arguments of a form, without its pixels; not to be written to."""
    return {
        name: np.broadcast_to(np.frombuffer(raw, dtype), shape)
        if len(raw) == np.dtype(dtype).itemsize
        else np.frombuffer(raw, dtype).reshape(shape)
        for name, dtype, shape, raw in form.arrays
    }


def unpack(form: ProcessorOutput, rows: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """The arguments again, on the rows' device; pixels in `dtype`."""
    flat, at, picture = rows.flatten(), 0, {}
    for name, shape in form.pixels:
        size = int(np.prod(shape))
        picture[name] = flat[at : at + size].view(shape).to(dtype)
        at += size
    others = {name: torch.from_numpy(array.copy()).to(rows.device) for name, array in arrays_of(form).items()}
    return picture | others
