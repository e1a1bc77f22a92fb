"""What each shard of a step has to compute, by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dhp.batch.shard import encoder_work, text_work
from dhp.core.axes import Degrees
from dhp.core.batch import TextInput, VisionInput
from dhp.models.flops import TextWork
from tests.helpers.batches import awkward_steps
from tests.helpers.layouts import Case, make_reader

NONE = torch.zeros(0)


def vision(segments: tuple[int, ...], shards: Any = (), rows: tuple[int, ...] = (1,)) -> VisionInput:
    return VisionInput(NONE, NONE, (), segments, shards, rows)


def text(count: int, length: int, lengths: tuple[int, ...] | None = None) -> TextInput:
    return TextInput({"input_ids": torch.zeros(count, length)}, lengths, {}, 1.0)


def row(*targets: int) -> Any:
    return [SimpleNamespace(target_tokens=count) for count in targets]


def test_an_encoder_counts_patches_and_what_attention_adds() -> None:
    inputs = [[vision((4, 8)), vision((12,))], [vision((4,), rows=(0,)), vision((4,))]]
    assert encoder_work(inputs, 1, math.inf) == (12.0, 16.0)  # a dummy window is no work
    assert encoder_work(inputs, 1, 4.0) == (4 * 2 + 8 * 3, 12 * 4 + 4 * 2)
    shards = (((0, 0, 4), (1, 0, 2)), ((1, 2, 6),))  # (segment, first patch, patches) of each of two ranks
    shared = [[vision((4, 8), shards), vision((4, 8), shards)]]
    assert encoder_work(shared, 2, 4.0) == (4 * 2 + 2 * 3, 6 * 3)
    assert encoder_work([], 1, 4.0) == ()


def test_the_decoder_counts_padding_pairs_and_targets() -> None:
    work = TextWork(token=10, pair=2, target=100)
    padded = [[text(2, 4), text(1, 6)]]
    rows = [[row(1, 2), row(0)]]
    assert text_work(padded, rows, 1, work) == (80 + 2 * 16 + 300, 60 + 36)
    packed = [[text(1, 4, (3, 5)), text(1, 4, (3, 5))]]  # two ranks share a row of 8 tokens
    assert text_work(packed, [[row(1, 2)]], 2, work) == (40 + 17 + 150,) * 2
    assert text_work([], [], 1, work) == ()


@pytest.mark.parametrize("case", [Case(Degrees(data=2), Degrees(data=2), 1), Case(Degrees(ulysses=2), Degrees(), 1)])
def test_a_step_says_it_for_all_shards(four_layers_model: str, case: Case) -> None:
    info = make_reader(four_layers_model, case, awkward_steps()).step(0).info
    assert {part: len(of) for part, of in info.work.items()} == {"vision": 2, "text": case.text.shards}
    assert all(share >= 0 for of in info.work.values() for share in of) and sum(info.work["text"]) > 0
