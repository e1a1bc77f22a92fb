"""Counted arithmetic against that of the plain models, run sample by sample under PyTorch's own counter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForImageTextToText

from dhp.base.degrees import Degrees
from dhp.data.sample import Sample
from dhp.models.family import ImageLayout
from dhp.models.flops import TextWork, VisionWork
from dhp.models.registry import load_family
from tests.helpers.layouts import Case, make_feed
from tests.helpers.tiny import make_sample

WITHIN = 0.01
LAYOUTS = [
    Case(Degrees(), Degrees(), micro_batches=1, packing=True),
    Case(Degrees(ulysses=2), Degrees(data=2), micro_batches=2),  # padded rows, dummy windows, a divided image
]


def qwen_step(family: Any) -> list[Sample]:
    """Images of several sizes, some with narrow windows at their edges, a video, text alone."""
    stamped = family.config.model_type.startswith("qwen3_vl")
    make = lambda *given, **more: make_sample(*given, family.processor.image_token_id, stamped=stamped, **more)
    return [
        make([(1, 16, 20)], 9, 4, 1),
        make([(1, 4, 6), (1, 10, 2)], 30, 12, 2),
        make([], 40, 25, 3),
        make([(3, 8, 10)], 5, 5, 4, seconds=(1.0,)),
    ]


def llava_step(family: Any) -> list[Sample]:
    """No, one and two images, all of one size."""
    values = dict(unit=1, values=family.tower.patch_dim)
    grids = ([(1, 4, 4)], [(1, 4, 4)] * 2, [], [])
    return [make_sample(g, 20 + 9 * n, 7, n, family.processor.image_token_id, **values) for n, g in enumerate(grids)]


STEPS: dict[str, Callable[[Any], list[Sample]]] = {
    "made_model": qwen_step,
    "few_keys_model": qwen_step,
    "tiny_assets": qwen_step,
    "qwen3_vl_model": qwen_step,
    "qwen3_vl_moe_model": qwen_step,
    "llava_model": llava_step,
    "experts_model": llava_step,
}


@dataclass(frozen=True)
class Counted:
    """A model, a step of samples, and the operations of the plain model on each of them alone: of each part, forward
    and with backward."""

    model: str
    samples: list[Sample]
    vision: dict[bool, float]
    text: dict[bool, float]


@pytest.fixture(scope="module", params=STEPS)
def counted(request: pytest.FixtureRequest) -> Counted:
    found = request.getfixturevalue(request.param)
    name = str(found / "model" if isinstance(found, Path) else found)
    family = load_family(name)
    samples = STEPS[request.param](family)
    # Attention written out as products of matrices, so that all of it is seen.
    model = AutoModelForImageTextToText.from_pretrained(name, attn_implementation="eager").train()
    model.set_experts_implementation("eager")  # nor is a product in groups counted
    vision, text = ({False: 0.0, True: 0.0} for _ in range(2))
    for sample in samples:
        for number in range(len(sample.grids)):
            _add(vision, _count(lambda: _encode(model, family, sample, number)))  # noqa: B023
        _add(text, _count(lambda: _logits(model, sample), causal=True))  # noqa: B023
    return Counted(name, samples, vision, text)


def _encode(model: Any, family: Any, sample: Sample, number: int) -> Tensor:
    pixels, grid = torch.from_numpy(sample.pixels[number]), torch.tensor([sample.grids[number]])
    named = family.processor.plain_inputs({"pixel_values": pixels, "image_grid_thw": grid})
    output = model.model.get_image_features(**named, return_dict=True)
    features = [rows for level in getattr(output, "deepstack_features", ()) for rows in level]
    return torch.cat([*output.pooler_output, *features])


def _logits(model: Any, sample: Sample) -> Tensor:
    """Of the tokens that have a target."""
    decoder = model.model.language_model
    embedded = decoder.embed_tokens(torch.from_numpy(sample.input_ids)[None] % decoder.config.vocab_size)
    states = decoder(inputs_embeds=embedded, use_cache=False).last_hidden_state
    return model.lm_head(states[0, :-1][torch.from_numpy(sample.labels[1:] != -100)])


def _count(run: Callable[[], Tensor], causal: bool = False) -> dict[bool, float]:
    found = {}
    with FlopCounterMode(display=False) as counter:
        output = run()
        found[False] = _useful(counter.get_flop_counts(), causal)
        output.sum().backward()
    return found | {True: _useful(counter.get_flop_counts(), causal)}


def _useful(counts: dict[str, dict[Any, int]], causal: bool) -> float:
    """Half of a causal attention's pairs see each other: of its products over all pairs half count, as in what they
    are compared with. And LLaVA computes a last layer that no output depends on."""
    attention = sum(n for operator, n in counts["Global"].items() if "bmm" in str(operator))
    assert attention
    unused = sum(counts.get("CLIPVisionModel.encoder.layers.2", {}).values())
    return sum(counts["Global"].values()) - (attention / 2 if causal else 0) - unused


def _add(total: dict[bool, float], more: dict[bool, float]) -> None:
    for backward, count in more.items():
        total[backward] += count


@pytest.mark.parametrize("backward", [False, True])
def test_each_part_equals_the_counter_of_pytorch(counted: Counted, backward: bool) -> None:
    family, samples = load_family(counted.model), counted.samples
    layouts = [family.tower.image_layout(grid) for sample in samples for grid in sample.grids]
    lengths = [len(sample.input_ids) for sample in samples]
    targets = sum(sample.target_tokens for sample in samples)
    assert family.tower.work.flops(layouts, backward) == pytest.approx(counted.vision[backward], rel=WITHIN)
    assert family.decoder.work.flops(lengths, targets, backward) == pytest.approx(counted.text[backward], rel=WITHIN)


@pytest.mark.parametrize("case", LAYOUTS, ids=str)
def test_a_step_counts_what_its_samples_need_however_it_is_dealt_out(counted: Counted, case: Case) -> None:
    flops = make_feed(counted.model, case, [counted.samples]).step(0).info.flops
    assert set(flops) == {"vision", "text"}
    assert flops["vision"] == pytest.approx(counted.vision[True], rel=WITHIN)
    assert flops["text"] == pytest.approx(counted.text[True], rel=WITHIN)


def layout(windows: Sequence[int], segments: Sequence[int]) -> ImageLayout:
    patches = sum(segments)
    return ImageLayout(torch.arange(patches // 4), 4, tuple(windows), tuple(segments), torch.zeros(patches, 2))


def test_each_kind_of_work_counts_by_what_it_grows_with() -> None:
    """Windows and segments by the squares of their lengths, a divided number never by the square of the sum."""
    layouts = [layout((8, 8, 4), (20,)), layout((4, 4), (4, 4))]
    flops = lambda **work: VisionWork(**(dict.fromkeys(NONE, 0) | work)).flops(layouts, backward=False)
    assert flops(patch=1) == flops(token=1) == 2 * 28
    assert flops(window_pair=1) == 2 * (64 + 64 + 16 + 16 + 16)
    assert flops(segment_pair=1) == 2 * (400 + 16 + 16)
    assert flops(embedding=1) == 2 * 7
    assert flops(token=1, beside=1) == 2 * (28 + 3) and flops(segment_pair=1, beside=1) == 2 * (441 + 25 + 25)
    assert TextWork(1, 0, 0).flops([3, 5], 2, False) == 16
    assert TextWork(0, 2, 0).flops([3, 5], 2, False) == 2 * (9 + 25)
    assert TextWork(0, 0, 1).flops([3, 5], 2, False) == 4


NONE = ("patch", "token", "window_pair", "segment_pair", "embedding")


def test_backward_is_twice_the_forward_but_for_the_patches_that_enter() -> None:
    one = [layout((8,), (8,))]
    for work, times in [(dict.fromkeys(NONE, 0) | {name: 1}, 2 if name == "patch" else 3) for name in NONE]:
        assert VisionWork(**work).flops(one) == times * VisionWork(**work).flops(one, backward=False)
    assert TextWork(5, 2, 7).flops([6], 3) == 3 * TextWork(5, 2, 7).flops([6], 3, backward=False)
    assert VisionWork(1, 1, 1, 1, 1).flops([]) == TextWork(1, 1, 1).flops([], 0) == 0


def test_a_large_model_in_figures() -> None:
    """6 operations a parameter and token, and attention: the rule of thumb for Qwen2.5-VL-7B at 4,096 tokens."""
    from dhp.models.flops import text_work

    shape = dict(num_hidden_layers=28, hidden_size=3584, num_attention_heads=28, num_key_value_heads=4)
    text = type("Text", (), shape | dict(intermediate_size=18944, vocab_size=152064))
    matrices = 28 * (2 * 3584 * 3584 + 2 * 3584 * 512 + 3 * 3584 * 18944)
    found = text_work(text).flops([4096], 4096)
    assert found == 6 * 4096 * (matrices + 3584 * 152064) + 6 * 28 * 3584 * 4096**2
    assert np.isclose(found, 4096 * (6 * 7.07e9) + 6 * 28 * 3584 * 4096**2, rtol=1e-3)
