"""The table of what a run trains, at which rates."""

from __future__ import annotations

from collections import Counter

from dhp.config.training import TrainingConfig
from dhp.core.parameters import Group, is_adapter, is_inside
from dhp.core.text import aligned
from dhp.trainer.plan import RunPlan
from dhp.trainer.trainable import PROJECTOR, part_names

ADAPTERS = " adapters"  # after the name of their part
_HEADINGS = ("part", "group", "parameters", "learning rate", "weight decay", "warm-up")


def table_of_training(plan: RunPlan) -> list[str]:
    """Lines that say what is trained and how: a row for each group of each part, one for what of it is frozen."""
    training, family, rules = plan.config.training, plan.family, plan.rules
    rows, counts, trained = Counter[tuple[str, Group | None]](), 0, 0
    for one in plan.parameters:
        label = PROJECTOR if is_inside(one.name, family.parts[one.part].projector) else one.part
        label += ADAPTERS if is_adapter(one.name) else ""
        default = Group(rules.default_name(one.part), training.learning_rate, training.weight_decay, -1)
        on = one.used and rules.trains(one.name)
        rows[label, rules.group(one.name, default) if on else None] += one.size
        counts += one.size
        trained += one.size if on else 0
    order = [name + kind for name in part_names(family) for kind in ("", ADAPTERS)]
    lines = sorted(rows.items(), key=lambda item: (order.index(item[0][0]), item[0][1] is None))
    body = [_row(label, group, size, training) for (label, group), size in lines]
    total = f"{trained:,} of {counts:,} parameters are trained ({100 * trained / max(counts, 1):.3g}%)"
    return [*aligned([_HEADINGS, *body], left=2), total]


def _row(label: str, group: Group | None, size: int, training: TrainingConfig) -> tuple[str, ...]:
    if group is None:
        return (label, "frozen", f"{size:,}", "-", "-", "-")
    warmup = group.warmup_steps if group.warmup_steps >= 0 else training.warmup_steps
    warmup_text = f"{training.warmup_ratio:.3g} of all steps" if warmup is None else f"{warmup} steps"
    return (label, group.name, f"{size:,}", f"{group.learning_rate:.3g}", f"{group.weight_decay:.3g}", warmup_text)
