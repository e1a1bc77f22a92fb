"""Makes random pictures and their arguments from a configuration.

The arguments of `get_image_features` determine the form; where several are possible, the first that runs is used."""

from collections.abc import Callable, Iterator, Mapping
from inspect import signature
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig

from dhp.core.batch import ProcessorOutput

_GRIDS = ("image_grid_thw", "image_grid_hw")  # arguments that say how many patches lie where


def pack(
    picture: Mapping[str, np.ndarray], tokens: int, values: int, written: str = ""
) -> tuple[np.ndarray, ProcessorOutput]:
    """One picture's arguments as rows [rows, values], float32, and its form."""
    kept = {name: np.asarray(array) for name, array in picture.items() if array is not None}
    pixels = {name: array for name, array in kept.items() if array.dtype.kind == "f"}
    others = tuple(
        (name, str(array.dtype), array.shape, brief(array)) for name, array in kept.items() if name not in pixels
    )
    flat = np.concatenate([np.asarray(array, np.float32).reshape(-1) for array in pixels.values()])
    rows = -(-len(flat) // values)
    whole = np.zeros((rows, values), np.float32)
    whole.reshape(-1)[: len(flat)] = flat
    return whole, ProcessorOutput(
        tuple((name, array.shape) for name, array in pixels.items()), others, rows, tokens, written
    )


def brief(array: np.ndarray) -> bytes:
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


def frame_patches(form: ProcessorOutput, channels: int, side: int) -> tuple[int, ...]:
    """Patches of each frame or tile of a picture: by its grids where it has some, else of each tile of pixels [...,
    channels, height, width]. Where it has neither, its rows are one frame.

    side: pixels along a patch."""
    arrays = arrays_of(form)
    for name in _GRIDS:
        if name in arrays:
            sizes = arrays[name].reshape(-1, arrays[name].shape[-1]).tolist()  # [pictures, (steps,) rows, columns]
            return tuple(h * w for *t, h, w in sizes for _ in range(*(t or [1])))
    tiles: list[int] = []
    for _, shape in form.pixels:
        if len(shape) < 4 or shape[-3] != channels or min(shape[-2:]) < side:
            return (form.rows,)
        tiles += [(shape[-2] // side) * (shape[-1] // side)] * prod(shape[:-3])
    return tuple(tiles)


def unpack(form: ProcessorOutput, rows: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """The arguments again, on the rows' device; pixels in `dtype`. Of rows without values the others keep theirs, as
    they say where tiles lie."""
    flat, at, picture = rows.flatten(), 0, {}
    for name, shape in form.pixels:
        size = int(np.prod(shape))
        picture[name] = flat[at : at + size].view(shape).to(dtype)
        at += size
    device = torch.device("cpu") if rows.is_meta else rows.device
    others = {name: torch.from_numpy(array.copy()).to(device) for name, array in arrays_of(form).items()}
    return picture | others


Picture = dict[str, Tensor]  # arguments of get_image_features, for one picture
Make = Callable[[int], Picture]  # a picture by its number; pictures of different numbers differ in size where they may


def ways(config: PreTrainedConfig, encode: Callable[..., Any]) -> Iterator[Make]:
    """Possible forms of pictures for `encode` (get_image_features), the likeliest first. Pixels are float64."""
    asked = set(signature(encode).parameters)
    vision = getattr(config, "vision_config", None) or config
    sizes = _Sizes(config, vision)
    if "image_grid_thw" in asked or "image_grid_hw" in asked:
        yield from _by_grid(sizes, asked)
    elif "image_position_ids" in asked:
        yield from (sizes.positioned, sizes.positioned_tokens)
    elif "spatial_shapes" in asked:
        yield sizes.shaped
    elif "target_sizes" in asked:
        yield sizes.strip
    elif "pixel_values_local" in asked:
        yield sizes.with_crops
    elif "high_res_pixel_values" in asked:
        yield sizes.with_high_resolution
    elif "pixel_attention_mask" in asked or "pixel_mask" in asked:
        yield from (sizes.masked_stack, sizes.masked, sizes.masked_tiles)
    elif "image_sizes" in asked:
        yield from (sizes.tiles, sizes.padded, sizes.square)
    elif "image_token_pooling" in asked:
        yield sizes.pooled
    else:
        yield from (sizes.square, sizes.patches, sizes.volumes)


def plain_frame(config: PreTrainedConfig, number: int) -> Picture:
    """A frame of the tower's one size."""
    return _Sizes(config, getattr(config, "vision_config", None) or config).square(number)


def row_values(config: PreTrainedConfig) -> int:
    """Values of a patch of one picture: pixels are sent in rows of so many."""
    sizes = _Sizes(config, getattr(config, "vision_config", None) or config)
    return sizes.channels * sizes.patch**2


def patch_shape(config: PreTrainedConfig) -> tuple[int, int, int]:
    """(channels, pixels along a side, patches along a side of the square that becomes one token)."""
    sizes = _Sizes(config, getattr(config, "vision_config", None) or config)
    return sizes.channels, sizes.patch, sizes.merge


class _Sizes:
    """Numbers that vision configurations share."""

    def __init__(self, config: Any, vision: Any):
        self.config, self.vision = config, vision
        self.channels = _whole(vision, "in_channels", "num_channels", "in_chans") or 3
        self.patch = _whole(vision, "patch_size") or 14
        self.frames = _whole(vision, "temporal_patch_size", "patch_temporal") or 1
        merge = _whole(vision, "spatial_merge_size", "merge_size", "merge_kernel_size", "pooling_kernel_size")
        self.merge = merge or _whole(config, "spatial_merge_size", "downsample_factor") or 2
        self.side = _whole(vision, "image_size") or self.patch * self.merge * 4

    def square(self, number: int) -> Picture:
        return {"pixel_values": _random(number, 1, self.channels, self.side, self.side)}

    def tiles(self, number: int) -> Picture:
        """A picture of another shape is so many more tiles."""
        from transformers.image_processing_utils import select_best_resolution

        size = ((self.side, self.side), (self.side, 2 * self.side), (2 * self.side - 3, self.side))[number % 3]
        fitted = select_best_resolution(size, self.config.image_grid_pinpoints)
        count = 1 + fitted[0] * fitted[1] // self.side**2
        pixels = _random(number, 1, count, self.channels, self.side, self.side)
        return {"pixel_values": pixels, "image_sizes": torch.tensor([size])}

    def padded(self, number: int) -> Picture:
        cell = self.patch * self.merge
        height, width = ((2, 2), (2, 4), (4, 2))[number % 3]
        pixels = _random(number, 1, self.channels, height * cell, width * cell)
        return {"pixel_values": pixels, "image_sizes": torch.tensor([[height * cell, width * cell]])}

    def masked_stack(self, number: int) -> Picture:
        pixels = _random(number, 1, 1, self.channels, self.side, self.side)
        return {
            "pixel_values": pixels,
            "pixel_attention_mask": torch.ones(1, 1, self.side, self.side, dtype=torch.bool),
        }

    def masked(self, number: int) -> Picture:
        pixels = _random(number, 1, self.channels, self.side, self.side)
        return {"pixel_values": pixels, "pixel_mask": torch.ones(1, self.side, self.side, dtype=torch.bool)}

    def masked_tiles(self, number: int) -> Picture:
        pixels = _random(number, 1, 1, self.channels, self.side, self.side)
        return {"pixel_values": pixels, "pixel_attention_mask": torch.ones(1, 1, dtype=torch.bool)}

    def patches(self, number: int) -> Picture:
        """Patches of a picture without a tower."""
        return {"pixel_values": _random(number, 1, (4, 8, 2)[number % 3], self.channels * self.patch**2)}

    def volumes(self, number: int) -> Picture:
        """Patches over time, each of which becomes a token."""
        count = (4, 8, 2)[number % 3]
        return {"pixel_values": _random(number, count, self.frames, self.patch, self.patch, self.channels)}

    def pooled(self, number: int) -> Picture:
        """Patches of a picture of one size, and of which of them each token is made."""
        across = self.side // self.patch
        places = torch.arange(across**2).view(across // 2, 2, across // 2, 2).transpose(1, 2).reshape(-1, 4)
        pixels = _random(number, 1, across**2, self.channels * self.patch**2)
        grids = torch.tensor([[across // 2, across // 2, 0, 0]])
        return {"pixel_values": pixels, "image_token_pooling": places, "image_grids": grids}

    def positioned_tokens(self, number: int) -> Picture:
        """Patches that became one token before."""
        return self.positioned(number, 1, self.channels * (self.merge * self.patch) ** 2)

    def positioned(self, number: int, merge: int = 0, values: int = 0) -> Picture:
        merge, values = merge or self.merge, values or self.channels * self.patch**2
        height, width = (merge * n for n in ((2, 2), (1, 2), (2, 1))[number % 3])
        most = 4 * merge**2
        pixels = torch.zeros(1, most, values, dtype=torch.float64)
        pixels[:, : height * width] = _random(number, 1, height * width, pixels.shape[-1]).sigmoid()
        places = torch.full((1, most, 2), -1)
        rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        places[0, : height * width] = torch.stack([columns.flatten(), rows.flatten()], dim=-1)
        return {"pixel_values": pixels, "image_position_ids": places}

    def shaped(self, number: int) -> Picture:
        height, width = ((4, 4), (2, 4), (4, 2))[number % 3]
        pixels = torch.zeros(1, 16, self.channels * self.patch**2, dtype=torch.float64)
        pixels[:, : height * width] = _random(number, 1, height * width, pixels.shape[-1])
        mask = (torch.arange(16) < height * width).long()[None]
        return {"pixel_values": pixels, "spatial_shapes": torch.tensor([[height, width]]), "pixel_attention_mask": mask}

    def strip(self, number: int) -> Picture:
        height, width = ((8, 8), (8, 4), (4, 8))[number % 3]
        pixels = _random(number, 1, self.channels, self.patch, self.patch * height * width)
        return {"pixel_values": pixels, "target_sizes": torch.tensor([[height, width]])}

    def with_crops(self, number: int) -> Picture:
        return self.square(number) | {"pixel_values_local": None, "num_local_patches": torch.tensor([0])}

    def with_high_resolution(self, number: int) -> Picture:
        side = _whole(self.config.high_res_vision_config, "image_size")
        return self.square(number) | {"high_res_pixel_values": _random(number, 1, self.channels, side, side)}


def _by_grid(sizes: _Sizes, asked: set[str]) -> Iterator[Make]:
    cell = (sizes.channels, sizes.patch, sizes.patch)
    flat = sizes.channels * sizes.patch**2
    token = (sizes.merge * sizes.patch, sizes.merge * sizes.patch, sizes.channels)  # of which a grid may count
    for values in ((flat * sizes.frames,), (flat,), cell, (flat * 2,), token):

        def make(number: int, values: tuple[int, ...] = values) -> Picture:
            height, width = (sizes.merge * n for n in ((2, 2), (2, 4), (4, 2))[number % 3])
            picture = {"pixel_values": _random(number, height * width, *values)}
            if "image_grid_hw" in asked:
                return picture | {"image_grid_hw": torch.tensor([[height, width]])}
            more = {"image_merge_sizes": torch.tensor([sizes.merge])} if "image_merge_sizes" in asked else {}
            return picture | {"image_grid_thw": torch.tensor([[1, height, width]])} | more

        yield make


def _whole(section: Any, *names: str) -> int | None:
    for name in names:
        value = getattr(section, name, None)
        value = value[0] if isinstance(value, list | tuple) and value else value
        if isinstance(value, int):
            return value
    return None


def _random(number: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(number))


def joined(pictures: list[Mapping[str, Tensor]]) -> Picture:
    """Several pictures as the arguments of one call. Pictures of one stack are concatenated along their second
    dimension, strips one after another; sizes that differ are padded with zeros, as image processors do."""
    if len(pictures) == 1:
        return dict(pictures[0])
    if _POOLING in pictures[0]:
        pictures = _counted_on(pictures)
    return {name: _join(name, [picture[name] for picture in pictures], pictures[0]) for name in pictures[0]}


_POOLING = "image_token_pooling"


def _counted_on(pictures: list[Mapping[str, Tensor]]) -> list[Mapping[str, Tensor]]:
    """Pictures whose numbers of patches go on behind those of the pictures before; -1 is none."""
    before, counted = 0, []
    for picture in pictures:
        places = picture[_POOLING]
        counted.append({**picture, _POOLING: torch.where(places < 0, places, places + before)})
        before += prod(picture["pixel_values"].shape[:-1])
    return counted


def _join(name: str, tensors: list[Tensor], first: Mapping[str, Tensor]) -> Tensor | None:
    if tensors[0] is None:
        return None
    stacked = name in ("pixel_values", "pixel_attention_mask") and first["pixel_values"].ndim == 5
    if stacked and "pixel_attention_mask" in first:
        return torch.cat(_filled(tensors, 1), dim=1)
    if set(first) == {"pixel_values"} and tensors[0].ndim == 3:
        return torch.cat(tensors, dim=1)
    if name == "pixel_values" and "target_sizes" in first:
        return torch.cat(tensors, dim=-1)
    return torch.cat(_filled(tensors, 0), dim=0)


def _filled(tensors: list[Tensor], along: int) -> list[Tensor]:
    largest = [max(t.shape[dim] for t in tensors) for dim in range(tensors[0].ndim)]
    filled = []
    for tensor in tensors:
        wanted = [n if dim == along else largest[dim] for dim, n in enumerate(tensor.shape)]
        if list(tensor.shape) == wanted:
            filled.append(tensor)
            continue
        whole = tensor.new_zeros(wanted)
        whole[tuple(slice(n) for n in tensor.shape)] = tensor
        filled.append(whole)
    return filled
