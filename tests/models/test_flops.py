"""Operations of each part, trained and frozen."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch

from dhp.batch.collate import Collator
from dhp.batch.shard import BatchSharder, Division
from dhp.config.training import TrainingConfig
from dhp.core.axes import Degrees
from dhp.core.parameters import AdapterSettings
from dhp.data.sample.sample import Sample
from dhp.data.sampling.dataset import StepSamples
from dhp.models.empty import adapt, list_parameters
from dhp.models.flops import EVERYTHING, NO_BACKWARD, MatmulShare, TextWork, TrainedShare, VisionWork
from dhp.models.registry import load_family
from dhp.models.shape import find_passes
from dhp.models.types import ImageLayout
from dhp.plan.trainable import training_rules
from tests.helpers.arithmetic import count_decoding, count_encoding, load_plain
from tests.helpers.layouts import Case, make_reader
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
    model = load_plain(name)
    vision, text = ({False: 0.0, True: 0.0} for _ in range(2))
    for sample in samples:
        for number in range(len(sample.grids)):
            _add(vision, count_encoding(model, family, sample, number))
        _add(text, count_decoding(model, sample))
    return Counted(name, samples, vision, text)


def _add(total: dict[bool, float], more: dict[bool, float]) -> None:
    for backward, count in more.items():
        total[backward] += count


@pytest.mark.parametrize("backward", [False, True])
def test_each_part_equals_the_counter_of_pytorch(counted: Counted, backward: bool) -> None:
    family, samples = load_family(counted.model), counted.samples
    layouts = [family.tower.image_layout(grid) for sample in samples for grid in sample.grids]
    lengths = [len(sample.input_ids) for sample in samples]
    targets = sum(sample.target_tokens for sample in samples)
    passes = EVERYTHING if backward else NO_BACKWARD
    assert family.tower.work.flops(layouts, passes) == pytest.approx(counted.vision[backward], rel=WITHIN)
    assert family.decoder.work.flops(lengths, targets, passes) == pytest.approx(counted.text[backward], rel=WITHIN)


@pytest.mark.parametrize("case", LAYOUTS, ids=str)
def test_a_step_counts_what_its_samples_need_however_it_is_dealt_out(counted: Counted, case: Case) -> None:
    flops = make_reader(counted.model, case, [counted.samples]).step(0).info.flops
    assert set(flops) == {"vision", "text"}
    assert flops["vision"] == pytest.approx(counted.vision[True], rel=WITHIN)
    assert flops["text"] == pytest.approx(counted.text[True], rel=WITHIN)


def test_a_step_counts_what_its_parts_compute(made_model: str) -> None:
    family, half = load_family(made_model), TrainedShare(layers=MatmulShare(inputs=0.0), attention=0.5)
    samples, slot = qwen_step(family), lambda sample: (sample,)
    dealer = BatchSharder(family, Collator(family, 0, True), Division(passes={"vision": NO_BACKWARD, "text": half}))
    flops = dealer.shard(StepSamples(0, 0, tuple((slot(sample),) for sample in samples), ())).info.flops
    lengths, targets = [len(s.input_ids) for s in samples], sum(s.target_tokens for s in samples)
    layouts = [family.tower.image_layout(grid) for sample in samples for grid in sample.grids]
    assert flops["vision"] == family.tower.work.flops(layouts, NO_BACKWARD) < family.tower.work.flops(layouts)
    work = family.decoder.work
    less = 2 * work.token * sum(lengths) + 2 * (work.pair * sum(n * n for n in lengths) // 2)
    assert flops["text"] == work.flops(lengths, targets) - less


def layout(windows: Sequence[int], segments: Sequence[int]) -> ImageLayout:
    patches = sum(segments)
    return ImageLayout(torch.arange(patches // 4), 4, tuple(windows), tuple(segments), torch.zeros(patches, 2))


def test_each_kind_of_work_counts_by_what_it_grows_with() -> None:
    """Windows and segments by the squares of their lengths, a divided number never by the square of the sum."""
    layouts = [layout((8, 8, 4), (20,)), layout((4, 4), (4, 4))]
    flops = lambda **work: VisionWork(**(dict.fromkeys(NONE, 0) | work)).flops(layouts, NO_BACKWARD)
    assert flops(patch=1) == flops(token=1) == 2 * 28
    assert flops(window_pair=1) == 2 * (64 + 64 + 16 + 16 + 16)
    assert flops(segment_pair=1) == 2 * (400 + 16 + 16)
    assert flops(embedding=1) == 2 * 7
    assert flops(token=1, extra_tokens=1) == 2 * (28 + 3)
    assert flops(segment_pair=1, extra_tokens=1) == 2 * (441 + 25 + 25)
    assert TextWork(1, 0, 0).flops([3, 5], 2, NO_BACKWARD) == 16
    assert TextWork(0, 2, 0).flops([3, 5], 2, NO_BACKWARD) == 2 * (9 + 25)
    assert TextWork(0, 0, 1).flops([3, 5], 2, NO_BACKWARD) == 4


NONE = ("patch", "token", "window_pair", "segment_pair", "embedding")


def test_backward_is_twice_the_forward_but_for_the_patches_that_enter() -> None:
    one = [layout((8,), (8,))]
    for work, times in [(dict.fromkeys(NONE, 0) | {name: 1}, 2 if name == "patch" else 3) for name in NONE]:
        assert VisionWork(**work).flops(one) == times * VisionWork(**work).flops(one, NO_BACKWARD)
    assert TextWork(5, 2, 7).flops([6], 3) == 3 * TextWork(5, 2, 7).flops([6], 3, NO_BACKWARD)
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


LORA = AdapterSettings(4, 8.0)
NO_ADAPTERS: Mapping[str, AdapterSettings] = MappingProxyType({})
WHOLE = TrainedShare(entering=MatmulShare(inputs=0.0))  # pixels and words have no gradient
NO_VISION = ["vision", "projector"]
TRAINED: dict[str, dict[str, Any]] = {
    "nothing_of_vision": dict(frozen=NO_VISION),
    "projector": dict(trainable=["projector"]),
    "projector_and_text": dict(frozen=["vision"]),
    "vision": dict(trainable=["vision"]),
    "head": dict(trainable=["lm_head"]),
    "last_layer": dict(trainable=["language_model.layers.1"]),
    "outputs_of_attention": dict(trainable=["o_proj"]),
    "gates": dict(trainable=["gate_proj", "up_proj"], frozen=NO_VISION),
    "biases_and_norms": dict(trainable=["*norm", "bias"]),
    "adapters_of_text": dict(frozen=NO_VISION, adapted={"text": LORA}),
    "adapters_of_both": dict(adapted={"vision": LORA, "text": LORA}),
    "adapters_and_projector": dict(trainable=["projector"], adapted={"text": LORA}),
}


@dataclass(frozen=True)
class CountedTrainedFlops:
    """Operations of each part: by what is said of them, with all of them trained, and of the plain model."""

    said: tuple[int, int]
    of_all: tuple[int, int]
    plain: tuple[float, float]


def count(
    name: str, samples: Sequence[Sample], adapted: Mapping[str, AdapterSettings] = NO_ADAPTERS, **asked: Any
) -> CountedTrainedFlops:
    family = load_family(name)
    rules = training_rules(TrainingConfig(**asked), family, adapted)
    passes = find_passes(family, list_parameters(name, family, adapted), rules)
    model = load_plain(name)
    adapt(model, family, adapted, "cpu")
    for parameter_name, parameter in model.named_parameters():
        parameter.requires_grad_(rules.trains(parameter_name))
    handed = any(p.requires_grad for module in family.tower.modules for p in model.get_submodule(module).parameters())
    layouts = [family.tower.image_layout(grid) for sample in samples for grid in sample.grids]
    lengths = [len(sample.input_ids) for sample in samples]
    targets = sum(sample.target_tokens for sample in samples)

    def told(vision: TrainedShare, text: TrainedShare) -> tuple[int, int]:
        return family.tower.work.flops(layouts, vision), family.decoder.work.flops(lengths, targets, text)

    vision = [count_encoding(model, family, s, n)[True] for s in samples for n in range(len(s.grids))]
    text = [count_decoding(model, sample, handed)[True] for sample in samples]
    return CountedTrainedFlops(told(**passes), told(EVERYTHING, EVERYTHING), (sum(vision), sum(text)))


@pytest.mark.parametrize("trained", TRAINED)
def test_operations_are_those_of_the_plain_model(trained: str, made_model: str) -> None:
    image = load_family(made_model).processor.image_token_id
    found = count(made_model, [make_sample([(1, 16, 20)], 9, 4, 1, image)], **TRAINED[trained])
    assert found.said == pytest.approx(found.plain, rel=WITHIN)
    assert sum(found.of_all) > 1.05 * sum(found.plain)  # it matters


@pytest.mark.parametrize("trained", ["projector", "vision", "adapters_of_both"])
def test_of_images_of_one_size(trained: str, llava_model: str) -> None:
    family = load_family(llava_model)
    sample = make_sample([(1, 4, 4)], 20, 7, 1, family.processor.image_token_id, unit=1, values=family.tower.patch_dim)
    found = count(llava_model, [sample], **TRAINED[trained])
    assert found.said == pytest.approx(found.plain, rel=WITHIN)


def passes_of(model: str, **asked: Any) -> dict[str, TrainedShare]:
    family = load_family(model)
    return find_passes(family, list_parameters(model, family), training_rules(TrainingConfig(**asked), family))


def test_all_and_nothing(made_model: str) -> None:
    assert passes_of(made_model) == {"vision": WHOLE, "text": EVERYTHING}
    found = passes_of(made_model, frozen=NO_VISION)
    assert found["vision"] == NO_BACKWARD
    assert found["text"] == WHOLE  # the embedding is trained, and so what it gives has a gradient


def test_a_decoder_that_is_not_trained_lets_gradients_through(made_model: str) -> None:
    found = passes_of(made_model, frozen=["text"])
    assert found["vision"] == WHOLE
    assert found["text"].layers == found["text"].ending == MatmulShare(weights=0.0) and found["text"].attention == 1


def test_a_head_that_is_the_embedding_is_trained_with_it(few_keys_model: str) -> None:
    assert load_family(few_keys_model).decoder.tied
    frozen = passes_of(few_keys_model, trainable=["layers.1"])["text"]
    assert frozen.ending == MatmulShare(weights=0.0) and frozen.attention == 0.5
    trained = passes_of(few_keys_model, trainable=["embed_tokens"])["text"]
    assert trained.ending == MatmulShare() and trained.layers == MatmulShare(weights=0.0)


def test_experts_count_as_often_as_they_are_visited(qwen3_vl_moe_model: str) -> None:
    family = load_family(qwen3_vl_moe_model)
    experts, hidden = family.decoder.experts, family.config.get_text_config().hidden_size
    visited = sum(experts.sparse) * experts.visits * 3 * hidden * experts.width
    found = passes_of(qwen3_vl_moe_model, trainable=["experts"])["text"].layers
    assert found.weights == pytest.approx(visited / family.decoder.work.token, rel=WITHIN)
