"""What is counted of a model of which not all is trained, against PyTorch's own counter on the plain model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import pytest

from dhp.config.training import TrainingConfig
from dhp.core.parameters import AdapterSettings
from dhp.data.sample.sample import Sample
from dhp.models.empty import adapt, list_parameters
from dhp.models.flops import EVERYTHING, NO_BACKWARD, MatmulShare, TrainedShare
from dhp.models.registry import load_family
from dhp.models.shape import find_passes
from dhp.plan.trainable import training_rules
from tests.helpers.arithmetic import count_decoding, count_encoding, load_plain
from tests.helpers.tiny import make_sample

WITHIN = 0.01
LORA = AdapterSettings(4, 8.0)
NONE: Mapping[str, AdapterSettings] = MappingProxyType({})
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
class Counted:
    """Operations of each part: by what is said of them, with all of them trained, and of the plain model."""

    said: tuple[int, int]
    of_all: tuple[int, int]
    plain: tuple[float, float]


def count(name: str, samples: Sequence[Sample], adapted: Mapping[str, AdapterSettings] = NONE, **asked: Any) -> Counted:
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
    return Counted(told(**passes), told(EVERYTHING, EVERYTHING), (sum(vision), sum(text)))


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
