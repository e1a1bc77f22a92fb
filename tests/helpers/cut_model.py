"""A tower and a decoder cut into chunks of layers, run one behind another in one process."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf, isnan

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from dhp.batch.collate import Collator
from dhp.data.sample.sample import Sample
from dhp.models.load import load_part
from dhp.models.registry import load_family
from dhp.models.tower import TowerInputs
from dhp.models.types import Chunk, DecoderInputs
from dhp.objectives.objective import Chosen, CrossEntropy, Head
from dhp.parallel.attention.segment_plan import plan_segments
from dhp.parallel.attention.segments import segment_attention
from dhp.parallel.tensor.slices import owned_parameters
from tests.helpers.oracle import Step

CPU = torch.device("cpu")
ATTENTION = "flash_dhp_chain"


@dataclass(frozen=True)
class Result:
    """loss: Σ token losses / N. gradients: by parameter; one that several groups hold has the sum of theirs."""

    loss: float
    gradients: dict[str, Tensor]


def cut_layers(counts: Sequence[int]) -> tuple[Chunk, ...]:
    """Chunks of so many layers each, in the order in which they run; together they are the whole decoder.

    Raises ValueError for a chunk without layers."""
    if not counts or min(counts) < 1:
        raise ValueError(f"chunks of {tuple(counts)} layers: each needs at least one")
    ends = list(accumulate(counts))
    return tuple(
        Chunk(range(end - count, end), first=end == count, last=end == ends[-1])
        for end, count in zip(ends, counts, strict=True)
    )


class CutModel:
    """Chunks in the order in which they run; `owners[i]` is the number of the group that holds chunk i."""

    def __init__(self, model_name: str, chunks: Sequence[Chunk], owners: Sequence[int]):
        self.family, self.chunks, self.owners = load_family(model_name), chunks, owners
        tower, decoder = self.family.tower, self.family.decoder
        AttentionInterface.register(ATTENTION, segment_attention)
        self.tower = load_part(model_name, decoder.modules, torch.float64)
        tower.use_attention(self.tower, ATTENTION)
        tower.freeze_unused(self.tower)
        self.held = [self._of(group) for group in range(max(owners) + 1)]
        self.groups = [self.load(model_name, (*tower.modules, *decoder.absent(held))) for held in self.held]

    def _of(self, group: int) -> list[Chunk]:
        return [chunk for chunk, owner in zip(self.chunks, self.owners, strict=True) if owner == group]

    def step(self, samples: Sequence[Sample]) -> Result:
        """Each sample by itself, forward and backward."""
        total = sum(sample.target_tokens for sample in samples)
        loss = sum(self._sample(sample, total) for sample in samples)
        gradients: dict[str, Tensor] = {}
        for name, parameter in self.tower.named_parameters():
            if parameter.grad is not None:
                gradients[name] = parameter.grad
        for part in self.groups:
            for name, owner, own in owned_parameters(part):
                gradients[name] = gradients.get(name, 0) + self.gradient(owner.get_parameter(own), owner, own)
        return Result(loss, gradients)

    def _sample(self, sample: Sample, total: int) -> float:
        named, _ = Collator(self.family, 0, packing=False).make((sample,))
        tensors = self.encode(sample) if sample.grids else {}
        leaves = {name: self.given(name, rows.detach()).requires_grad_() for name, rows in tensors.items()}
        image_rows = named["mm_token_type_ids"].flatten().nonzero()[:, 0]
        hidden: list[Tensor | None] = [None]
        outputs: list[Tensor] = []
        for chunk, owner in zip(self.chunks, self.owners, strict=True):
            images = {name: leaves[name] for name in self.family.decoder.entering(chunk) if name in leaves}
            inputs = DecoderInputs(named["input_ids"], named["position_ids"], images, image_rows, hidden[-1])
            outputs.append(self.run(owner, chunk, inputs))
            hidden.append(outputs[-1].detach().requires_grad_())
        loss = self.objective(hidden[-1], CrossEntropy().choose(named), total)
        loss.backward()
        for number in reversed(range(len(self.chunks))):
            outputs[number].backward(self.hidden_gradient(number, hidden[number + 1].grad))
        if tensors:
            given = [self.image_gradient(name, leaves[name].grad) for name in tensors]
            torch.autograd.backward(list(tensors.values()), given)
        return float(loss.detach())

    def encode(self, sample: Sample) -> dict[str, Tensor]:
        """The tower's tensors of all pictures, in the order of their placeholders."""
        tower = self.family.tower
        layouts = [tower.image_layout(grid) for grid in sample.grids]
        pixels = [torch.from_numpy(rows)[layout.patch_order()] for rows, layout in zip(sample.pixels, layouts)]
        windows, frames = (
            plan_segments([n for layout in layouts for n in getattr(layout, kind)], CPU)
            for kind in ("window_lengths", "frame_lengths")
        )
        positions = torch.cat([layout.positions for layout in layouts])
        encoded = tower.encode(self.tower, TowerInputs(torch.cat(pixels), positions, windows, frames))
        starts = torch.tensor([0, *(len(layout.order) for layout in layouts)]).cumsum(0)
        back = torch.cat([torch.argsort(layout.order) + start for layout, start in zip(layouts, starts)])
        return {name: rows[back] for name, rows in encoded.items()}

    def run(self, owner: int, chunk: Chunk, inputs: DecoderInputs) -> Tensor:
        """One chunk on the group that holds it."""
        return self.family.decoder.run(self.groups[owner], chunk, inputs)

    def load(self, model_name: str, dropped: tuple[str, ...]) -> PreTrainedModel:
        """A group's part of the decoder."""
        return load_part(model_name, dropped, torch.float64)

    def objective(self, hidden: Tensor, targets: Chosen, total: int) -> Tensor:
        """The loss of the last chunk's states."""
        head = Head(self.groups[self.owners[-1]].get_output_embeddings())
        return CrossEntropy().share(head, hidden.flatten(0, 1), targets, total)

    def gradient(self, parameter: Tensor, owner: nn.Module, own: str) -> Tensor:
        """Of a group's whole parameter, which is `own` of `owner`."""
        return parameter.grad

    def given(self, name: str, rows: Tensor) -> Tensor:
        """What the decoder gets of a tensor of the tower."""
        return rows.clone()

    def hidden_gradient(self, number: int, gradient: Tensor) -> Tensor:
        """What chunk `number` gets of the gradient of its states."""
        return gradient

    def image_gradient(self, name: str, gradient: Tensor) -> Tensor:
        """What the tower gets of the gradient of one of its tensors."""
        return gradient


def largest_difference(found: Result, wanted: Step) -> float:
    """The largest relative difference of the loss and of any gradient; one that is missing counts as zero.

    Gradients that are nothing but rounding, such as those of key biases without rotary positions, count by the norm of
    all."""
    gradients = {name: gradient for name, gradient in wanted.gradients.items() if gradient is not None}
    assert found.gradients.keys() <= gradients.keys(), found.gradients.keys() - gradients.keys()
    none, floor = torch.zeros(()), 1e-6 * wanted.norm
    errors = [abs(found.loss - wanted.loss) / abs(wanted.loss)]
    for name, gradient in gradients.items():
        error = float((found.gradients.get(name, none) - gradient).norm())
        errors.append(error / max(float(gradient.norm()), floor))
    return inf if any(map(isnan, errors)) else max(errors)
