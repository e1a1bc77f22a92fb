"""Collates a text replica's samples: rows padded or packed."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dhp.core.batch import IGNORED, SOUND, ProcessorOutput
from dhp.data.sample.sample import Sample
from dhp.models.contract.random_pictures import joined, unpack
from dhp.models.contract.random_rows import find_prefixes
from dhp.models.contract.videos import is_video
from dhp.models.decoder import Decoder
from dhp.models.family import Family
from dhp.objectives.objective import CrossEntropy, Objective
from dhp.parallel.attention.visibility import number_runs


def find_blocks(decoder: Decoder, tensors: dict[str, Tensor], lengths: Sequence[int] | None) -> Tensor | None:
    """Numbers of the blocks, int64 [rows × tokens], -1 in none; None where the family has none.

    tensors: as `dhp.batch.collate.Collator.make` gives them; lengths: of the samples of a packed row."""
    if decoder.block_rule is None:
        return None
    kinds = tensors["mm_token_type_ids"]
    rows, tokens = kinds.shape
    inside = (kinds > 0) & (kinds != SOUND)
    if decoder.sees_prefix:
        inside = find_prefixes(tensors["targets"].flatten(), (tokens,) * rows if lengths is None else lengths)
    return torch.where(inside.flatten(), 0, -1) if decoder.joins_images else number_runs(inside)


Row = tuple[Sample, ...]  # the samples of one text replica in one micro-batch

# Arguments of the model with a row a picture, where all others have an element a token.
GRIDS, VIDEO_GRIDS, VIDEO_SECONDS = "image_grid_thw", "video_grid_thw", "second_per_grid_ts"
BY_PICTURE = (GRIDS, VIDEO_GRIDS, VIDEO_SECONDS)


class Collator:
    """A replica's samples as one model's arguments. packing: all of them in one row without padding, not a row each.
    objective: whose columns stand in the place of labels."""

    def __init__(self, family: Family, pad_token_id: int, packing: bool, objective: Objective | None = None) -> None:
        self._family, self._pad, self._packing = family, pad_token_id, packing
        self.objective = objective or CrossEntropy()

    def make(self, row: Row) -> tuple[dict[str, Tensor], tuple[int, ...] | None]:
        """A replica's samples by model argument and column of the objective, and their lengths if they are packed."""
        if not self._packing or not row:
            return self._with_columns(row), (1,) if self._packing else None
        packed = [self._with_columns((sample,)) for sample in row]
        by_token = [name for name in packed[0] if name not in BY_PICTURE]
        joined = {name: torch.cat([named[name] for named in packed], dim=-1) for name in by_token}
        for name in BY_PICTURE:
            of_pictures = [named[name] for named in packed if name in named]
            joined |= {name: torch.cat(of_pictures)} if of_pictures else {}
        return joined, tuple(len(sample.input_ids) for sample in row)

    def padded(self, row: Row) -> dict[str, Tensor]:
        """Samples as right-padded rows, by model argument; one row of padding if there are none.

        No attention mask: under causal attention nothing before the padding can see it, and no target is on it."""
        lengths = torch.tensor([len(sample.input_ids) for sample in row] or [1])
        named = {
            "input_ids": _pad_rows([s.input_ids for s in row], self._pad, lengths),
            "labels": _pad_rows([s.labels for s in row], IGNORED, lengths),
            "mm_token_type_ids": _pad_rows([s.mm_token_type_ids for s in row], 0, lengths),
            **_grids(row),
        }
        # Each sample's alone: a family may count the pictures of all that it is given.
        found = [self.positions((sample,)) for sample in row] or [self.positions(())]
        longest = named["input_ids"].shape[1]
        named["position_ids"] = torch.cat([F.pad(one, (0, longest - one.shape[-1])) for one in found], dim=-2)
        return named

    def positions(self, row: Row) -> Tensor:
        """Positions of one sample's tokens, or of a token of padding, [..., 1, L]."""
        ids = _pad_rows([s.input_ids for s in row], self._pad, torch.tensor([len(s.input_ids) for s in row] or [1]))
        kinds, grids = _pad_rows([s.mm_token_type_ids for s in row], 0, torch.tensor([ids.shape[1]])), _grids(row)
        return self._family.processor.position_ids(
            ids,
            kinds,
            grids.get(GRIDS),
            torch.tensor([ids.shape[1]]),
            grids.get(VIDEO_GRIDS),
            grids.get(VIDEO_SECONDS),
            [grid for sample in row for grid in sample.grids if isinstance(grid, ProcessorOutput)],
            **_sounds(row),
        )

    def _with_columns(self, row: Row) -> dict[str, Tensor]:
        """As `padded`, with the objective's columns in place of the labels."""
        named = self.padded(row)
        lengths = torch.tensor([len(sample.input_ids) for sample in row] or [1])
        values = [self.objective.values(sample) for sample in row]
        del named["labels"]
        for name, fill in self.objective.columns.items():
            named[name] = _pad_rows([of_sample[name] for of_sample in values], fill, lengths)
        return named


def pixels_by_argument(row: Row) -> dict[str, Tensor]:
    """The patches of a row's images and of its videos, by argument of the plain model; of images that are no grids, all
    arguments of the encoder."""
    whole = [pair for sample in row for pair in zip(sample.grids, sample.pixels, strict=True)]
    forms = [form for form, _ in whole if isinstance(form, ProcessorOutput)]
    if forms:
        return whole_by_argument([(form, torch.from_numpy(pixels)) for form, pixels in whole], torch.float32)
    found: dict[str, list[Tensor]] = {}
    for sample in row:
        for pixels, seconds in zip(sample.pixels, sample.video_seconds, strict=True):
            name = "pixel_values" if seconds is None else "pixel_values_videos"
            found.setdefault(name, []).append(torch.from_numpy(pixels))
    return {name: torch.cat(patches) for name, patches in found.items()}


def whole_by_argument(pictures: Sequence[tuple[Any, Tensor]], dtype: torch.dtype) -> dict[str, Tensor]:
    """Forms of pictures and their rows as the plain model's own arguments: images and, where these have a function of
    their own, videos."""
    found: dict[str, Tensor] = {}
    for moving in (False, True):
        own: list[Any] = [unpack(form, rows, dtype) for form, rows in pictures if is_video(form) == moving]
        found |= joined(own) if own else {}
    return found


def sounds_by_argument(row: Row) -> dict[str, Tensor]:
    """The clips of a row by argument of the plain model, filled up to the longest of them."""
    clips = [torch.from_numpy(clip) for sample in row for clip in sample.clips]
    if not clips:
        return {}
    frames = torch.tensor([len(clip) for clip in clips])
    mask = (torch.arange(int(frames.max())) < frames[:, None]).long()
    features = pad_sequence(clips, batch_first=True).transpose(1, 2)
    return {"input_features": features, "feature_attention_mask": mask}


def _grids(row: Row) -> dict[str, Tensor]:
    every = [pair for sample in row for pair in zip(sample.grids, sample.video_seconds, strict=True)]
    seen = [(grid, seconds) for grid, seconds in every if not isinstance(grid, ProcessorOutput)]
    values = {
        GRIDS: [grid for grid, seconds in seen if seconds is None],
        VIDEO_GRIDS: [grid for grid, seconds in seen if seconds is not None],
        VIDEO_SECONDS: [seconds for _, seconds in seen if seconds is not None],
    }
    return {name: torch.tensor(rows) for name, rows in values.items() if rows}


def _sounds(row: Row) -> dict[str, Tensor]:
    """How long clips are, in frames, for a model that counts positions by them."""
    frames = [form.rows for sample in row for form in sample.clip_forms]
    return {"audio_seqlens": torch.tensor(frames)} if frames else {}


def _pad_rows(rows: Sequence[np.ndarray], fill: int | float, lengths: Tensor) -> Tensor:
    dtype = torch.float64 if isinstance(fill, float) else torch.long
    padded = torch.full((len(lengths), int(lengths.max())), fill, dtype=dtype)
    for into, row, length in zip(padded, rows, lengths.tolist(), strict=False):
        into[:length] = torch.from_numpy(row)  # of another length: an error
    return padded
