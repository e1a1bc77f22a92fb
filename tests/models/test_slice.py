"""A decoder cut into chunks of layers equals the whole plain model, in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import PreTrainedModel, Qwen3Config

from dhp.data.sample.sample import Sample
from dhp.models.load import load_part
from dhp.models.registry import load_family
from dhp.models.types import Chunk, DecoderInputs, held_layers
from dhp.objectives.objective import Chosen
from dhp.parallel.optim.fsdp import FullySharded
from dhp.parallel.recompute.recomputed_layers import RecomputedLayers
from dhp.parallel.tensor.slices import cut_of, use_local_slices
from dhp.parallel.tensor.tensor_plan import local_plan
from tests.helpers.cut_model import CutModel, cut_layers, largest_difference
from tests.helpers.layouts import UPDATE
from tests.helpers.norms import exact_norms
from tests.helpers.oracle import Oracle, Step
from tests.helpers.ranks import run_on_ranks
from tests.helpers.tiny import IMAGE_TOKEN, make_sample, save_llava, save_model

EXACT = 1e-9
CUTS = {  # layers of each chunk, and the group that holds it
    "whole": ((4,), (0,)),
    "two stages": ((1, 3), (0, 1)),
    "three stages": ((2, 1, 1), (0, 1, 2)),
    "four stages": ((1, 1, 1, 1), (0, 1, 2, 3)),
    "two groups of two chunks": ((1, 1, 1, 1), (0, 1, 0, 1)),
    "first and last in one group": ((1, 2, 1), (0, 1, 0)),
}


class Known:
    """A model with four decoder layers, samples, and what the plain model makes of them."""

    def __init__(self, name: Path, samples: list[Sample]):
        self.name, self.samples = str(name), samples
        self.step: Step = Oracle(self.name, torch.float64, UPDATE).step(samples)

    def difference(self, cut_model: CutModel) -> float:
        return largest_difference(cut_model.step(self.samples), self.step)


def qwen_samples() -> list[Sample]:
    make = lambda *given, **more: make_sample(*given, IMAGE_TOKEN, **more)
    return [make([(1, 4, 6)], 9, 4, 1), make([(1, 4, 4), (2, 4, 6)], 7, 5, 2, seconds=(None, 1.0)), make([], 8, 5, 3)]


def llava_samples() -> list[Sample]:
    make = lambda images, *given: make_sample([(1, 4, 4)] * images, *given, IMAGE_TOKEN, unit=1, values=3 * 14 * 14)
    return [make(1, 9, 4, 1), make(2, 7, 5, 2), make(0, 8, 5, 3)]


LAYERS = {"num_hidden_layers": 4}
MADE = {
    "qwen2_5_vl": lambda folder: Known(save_model(folder, text=LAYERS), qwen_samples()),
    "qwen2_5_vl, tied": lambda folder: Known(save_model(folder, tied=True, text=LAYERS), qwen_samples()),
    "llava": lambda folder: Known(save_llava(folder, **LAYERS), llava_samples()),
    "llava of qwen3": lambda folder: Known(save_llava(folder, Qwen3Config, head_dim=8, **LAYERS), llava_samples()),
}
CASES = [
    *(("qwen2_5_vl", cut) for cut in CUTS),
    ("qwen2_5_vl, tied", "two stages"),
    ("qwen2_5_vl, tied", "first and last in one group"),
    ("llava", "three stages"),
    ("llava of qwen3", "two groups of two chunks"),
]


@pytest.fixture(scope="module")
def known_models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Known]]:
    with exact_norms():
        yield cache(lambda name: MADE[name](tmp_path_factory.mktemp("slices") / "model"))


@pytest.mark.parametrize(("model", "cut"), CASES)
def test_chunks_equal_the_plain_model(known_models: Callable[[str], Known], model: str, cut: str) -> None:
    known, (counts, owners) = known_models(model), CUTS[cut]
    assert known.difference(CutModel(known.name, cut_layers(counts), owners)) < EXACT


class Sharded(CutModel):
    """Groups on several ranks that recompute their layers: cut by heads, or with states sharded over the ranks."""

    def __init__(self, model_name: str, chunks: Sequence[Chunk], owners: Sequence[int], tensor: bool):
        self.mesh, self.tensor = init_device_mesh("cpu", (2,), mesh_dim_names=("ranks",)), tensor
        super().__init__(model_name, chunks, owners)
        self.updates = [self._wrap(part, held) for part, held in zip(self.groups, self.held, strict=True)]

    def load(self, model_name: str, dropped: tuple[str, ...]) -> PreTrainedModel:
        if not self.tensor:
            return super().load(model_name, dropped)
        part = load_part(model_name, dropped, torch.float64, self.mesh, {}, local_plan)
        use_local_slices(part)
        return part

    def _wrap(self, part: PreTrainedModel, held: Sequence[Chunk]) -> FullySharded | None:
        parts = self.family.decoder.layers
        layers = list(part.get_submodule(parts.path))
        RecomputedLayers(layers, parts, ("linear", "all")[: len(layers)])
        if self.tensor:
            return None
        return FullySharded(part, layers, torch.optim.AdamW, self.mesh, tensor_rank=0, stage=3, dtype=torch.float64)

    def run(self, owner: int, chunk: Chunk, inputs: DecoderInputs) -> Tensor:
        compute = lambda: super(Sharded, self).run(owner, chunk, inputs)
        return compute() if self.tensor else self.updates[owner].forward(compute)

    def objective(self, hidden: Tensor, targets: Chosen, total: int) -> Tensor:
        compute = lambda: super(Sharded, self).objective(hidden, targets, total)
        return compute() if self.tensor else self.updates[self.owners[-1]].forward(compute)

    def gradient(self, parameter: Tensor, owner: nn.Module, own: str) -> Tensor:
        """Whole; both ranks have the same samples, so a sum over them is twice."""
        if not self.tensor:
            return parameter.grad.full_tensor() / 2
        cut = cut_of(owner, own)
        return parameter.grad if cut is None else cut.around(parameter.grad).full_tensor()


def _sharded_difference(model: str, samples: list[Sample], wanted: Step, tensor: bool) -> float:
    with exact_norms():
        return largest_difference(Sharded(model, cut_layers((1, 1, 1, 1)), (0, 1, 0, 1), tensor).step(samples), wanted)


ON_RANKS = [("qwen2_5_vl, tied", True), ("qwen2_5_vl", False)]


@pytest.mark.parametrize(("model", "tensor"), ON_RANKS, ids=["tensor", "fsdp"])
def test_two_chunks_a_group_on_ranks_that_recompute(
    known_models: Callable[[str], Known], model: str, tensor: bool
) -> None:
    known = known_models(model)
    assert max(run_on_ranks(_sharded_difference, 2, known.name, known.samples, known.step, tensor)) < EXACT


class LostHidden(CutModel):
    """What goes wrong: the first chunk gets no gradient of its states."""

    def hidden_gradient(self, number: int, gradient: Tensor) -> Tensor:
        return gradient if number else torch.zeros_like(gradient)


def test_a_lost_gradient_of_states_shows(known_models: Callable[[str], Known]) -> None:
    known = known_models("qwen2_5_vl")
    assert known.difference(LostHidden(known.name, cut_layers((2, 2)), (0, 1))) > 0.9


def test_a_layer_run_twice_shows(known_models: Callable[[str], Known]) -> None:
    known = known_models("qwen2_5_vl")
    overlapping = (Chunk(range(0, 2), True, False), Chunk(range(1, 4), False, True))
    assert known.difference(CutModel(known.name, overlapping, (0, 1))) > 1e-3


def test_half_of_a_tied_gradient_shows(known_models: Callable[[str], Known]) -> None:
    """The weight is held by the group with the first chunk and by that with the last, and each has a part."""
    known = known_models("qwen2_5_vl, tied")
    cut_model = CutModel(known.name, cut_layers((2, 2)), (0, 1))
    found = cut_model.step(known.samples)
    name = "model.language_model.embed_tokens.weight"
    parts = [dict(group.named_parameters())[name].grad for group in cut_model.groups]
    wanted = known.step.gradients[name]
    assert all(float((part - wanted).norm() / wanted.norm()) > 1e-2 for part in parts)
    torch.testing.assert_close(found.gradients[name], wanted, rtol=1e-9, atol=1e-12)


def test_each_group_holds_its_layers_under_their_own_names(made_model: str) -> None:
    first, second = cut_layers((1, 1))
    family = load_family(made_model)
    whole = dict(load_part(made_model, family.tower.modules, torch.float32).named_parameters())
    held = []
    for chunk in (first, second):
        part = load_part(made_model, (*family.tower.modules, *family.decoder.absent([chunk])), torch.float32)
        assert len(part.get_submodule(family.decoder.layers.path)) == 1
        held.append(dict(part.named_parameters()))
        assert all(torch.equal(weight, whole[name]) for name, weight in held[-1].items())
    path = "model.language_model."
    ends = {f"{path}embed_tokens.weight"}, {f"{path}norm.weight", "lm_head.weight"}
    for number, (names, end) in enumerate(zip(held, ends, strict=True)):
        assert names.keys() == {name for name in whole if name.startswith(f"{path}layers.{number}.")} | end


def test_a_tied_head_brings_the_embedding_along(few_keys_model: str) -> None:
    family = load_family(few_keys_model)
    (first, last), name = cut_layers((1, 1)), "model.language_model.embed_tokens"
    assert name not in family.decoder.absent([first]) + family.decoder.absent([last])
    part = load_part(few_keys_model, (*family.tower.modules, *family.decoder.absent([last])), torch.float32)
    assert part.lm_head.weight is part.get_submodule(name).weight
    assert "lm_head.weight" not in dict(part.named_parameters())


def test_what_is_absent_refuses_to_run(made_model: str) -> None:
    family = load_family(made_model)
    first, last = cut_layers((1, 1))
    part = load_part(made_model, (*family.tower.modules, *family.decoder.absent([last])), torch.float32)
    inputs = DecoderInputs(torch.zeros(1, 3, dtype=torch.long), torch.zeros(3, 1, 3, dtype=torch.long))
    with pytest.raises(RuntimeError, match="model.language_model.embed_tokens is not in this part"):
        family.decoder.run(part, first, inputs)


def test_cuts() -> None:
    assert cut_layers((2, 1, 3)) == (
        Chunk(range(0, 2), True, False), Chunk(range(2, 3), False, False), Chunk(range(3, 6), False, True),
    )  # fmt: skip
    assert cut_layers((5,)) == (Chunk(range(5), True, True),)
    assert held_layers([Chunk(range(4, 6), False, False), Chunk(range(1, 2), False, False)]) == (1, 4, 5)
    for counts in ((), (2, 0, 1)):
        with pytest.raises(ValueError, match="each needs at least one"):
            cut_layers(counts)
