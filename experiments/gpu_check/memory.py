"""Rows: what a part's states take on the device against what a dry run says of the same parameters."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from dhp.config.schema import PartConfig
from dhp.models.shape import part_shape
from dhp.parallel.tensor.styles import with_fused
from dhp.run.footprint import footprint
from experiments.gpu_check.setting import Setting
from experiments.gpu_check.two_layers import OnePart, make_model, sizes

NEAR = 0.05  # relative: small tensors take whole blocks of the allocator, and plans and buffers are not counted


def check(setting: Setting, part: str) -> dict[str, Any]:
    """Between steps there are weights, the optimizer's state and what gradients keep. At the peak of a step activations
    come on top, of which a dry run says nothing: they are what is left."""
    before = _allocated(setting)
    one = OnePart(setting, part, "none", sizes(setting, 1))
    for _ in range(2):  # the optimizer takes its state in the first
        if setting.cuda:
            torch.cuda.reset_peak_memory_stats()
        one.forward()
        one.backward()
        one.update()
    peak = torch.cuda.max_memory_allocated() - before if setting.cuda else None
    formula = _formula(setting, one, part)
    states = formula.states
    kept = _allocated(setting) - before if setting.cuda else _bytes(_tensors(one))
    least, most = states.weights + states.optimizer, states.total
    return {
        "ok": least * (1 - NEAR) <= kept <= most * (1 + NEAR),
        "between_steps_bytes": kept,
        "weights_bytes": states.weights,
        "gradients_bytes": states.gradients,
        "optimizer_bytes": states.optimizer,
        "loss_bytes": formula.loss,
        "peak_bytes": peak,
        "left_for_activations_bytes": None if peak is None else peak - states.total - formula.loss,
    }


def _formula(setting: Setting, one: OnePart, part: str) -> Any:
    model, family = make_model(setting), one.trainer.family
    own = family.parts[part]
    shape = part_shape(model, family.outside(part), added_plan=with_fused(own.tensor_plan, own.fused))
    config = PartConfig(dtype=one.trainer.settings.dtype, data=1, ring=1, ulysses=1, tensor=1)
    return footprint(config, one.trainer.spec, shape, own.head_shape([own.whole]), setting.cuda)


def _tensors(one: OnePart) -> Iterable[Tensor]:
    """What there is without an allocator to ask: parameters, and the optimizer's state but its counters."""
    yield from one.trainer.model.parameters()
    for state in one.trainer.optimizer.optimizer.state.values():
        yield from (value for value in state.values() if value.dim())


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _allocated(setting: Setting) -> int:
    gc.collect()
    return torch.cuda.memory_allocated() if setting.cuda else 0
