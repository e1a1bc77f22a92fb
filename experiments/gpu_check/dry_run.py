"""What a dry run says of one rank of a part, and whether what the rank keeps agrees with it."""

from __future__ import annotations

from dhp.config.schema import PartConfig
from dhp.models.empty import part_shape
from dhp.models.registry import load_family
from dhp.parallel.tensor.styles import with_fused
from dhp.plan.count.state_bytes import Footprint, footprint
from experiments.gpu_check.setting import Setting
from experiments.pair import pair_of

NEAR = 0.05  # relative: small tensors take whole blocks of the allocator, and plans and buffers are not counted


def footprint_of(setting: Setting, folder: str, part: str) -> Footprint:
    """Of the whole part of the model in that directory on one rank."""
    family = load_family(folder)
    own = family.parts[part]
    shape = part_shape(folder, family.outside(part), added_plan=with_fused(own.tensor_plan, own.fused))
    config = PartConfig(dtype=setting.format, data=1, ring=1, ulysses=1, tensor=1)
    return footprint(config, pair_of(family).stage(part), shape, own.head_shape([own.whole]), setting.cuda)


def agree(kept_bytes: int, *said: Footprint) -> bool:
    """Whether ranks keep so much between steps: weights, the optimizer's state, and what their gradients keep."""
    least = sum(one.states.weights + one.states.optimizer for one in said)
    return least * (1 - NEAR) <= kept_bytes <= sum(one.states.total for one in said) * (1 + NEAR)
