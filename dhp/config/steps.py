"""Counts of a step and of a run. Only the standard library is needed here, so that a machine without the packages that
read configurations can plan too."""

import math

from dhp.config.parts import resolved
from dhp.config.schema import Config
from dhp.core.errors import ConfigError


def micro_batches(config: Config) -> int:
    """Micro-batches of a step, from batch_size = text.data × micro_batch_size × micro_batches.

    Takes a resolved configuration. Raises ConfigError when that is no whole number, unless training.empty_rows lets the
    last micro-batch have fewer rows than there are replicas."""
    batch, micro, replicas = config.training.batch_size, config.training.micro_batch_size, resolved(config.text.data)
    together = replicas * micro
    if config.training.empty_rows and batch % micro == 0:
        return -(-batch // together)
    if batch % together:
        raise ConfigError(
            f"training.batch_size={batch} cannot be cut into whole micro-batches: batch_size({batch}) % "
            f"(text.data({replicas}) × micro_batch_size({micro}) = {together}) = {batch % together} != 0. "
            + _batch_remedy(batch, micro, replicas)
            + ("" if batch % micro else " Or, to go on on other actors with this batch_size, training.empty_rows=true.")
        )
    return batch // together


def vision_batch(config: Config) -> int:
    """Micro-batches whose pictures an encoder takes in one pass, no more than a step has; the last pass of a step may
    have fewer. Takes a resolved configuration."""
    count = micro_batches(config)
    return min(count, config.training.vision_batch or count)


def warmup_steps(config: Config, total_steps: int) -> int:
    """Steps of the warm-up: training.warmup_steps, else warmup_ratio of `total_steps` rounded up.

    Raises ConfigError when the warm-up, or that of a group of parameters, is longer than the run."""
    training = config.training
    groups = {f"training.groups.{name}": group.warmup_steps for name, group in training.groups.items()}
    for section, steps in {"training": training.warmup_steps, **groups}.items():
        if steps is not None and steps > total_steps:
            raise ConfigError(
                f"{section}.warmup_steps={steps} is longer than the run: warmup_steps({steps}) > "
                f"steps({total_steps}). Lower it, or raise training.num_epochs or training.max_steps."
            )
    if training.warmup_steps is None:
        return math.ceil(total_steps * training.warmup_ratio)
    return training.warmup_steps


def _batch_remedy(batch: int, micro: int, replicas: int) -> str:
    together = replicas * micro
    sizes = sorted({max(1, batch // together) * together, -(-batch // together) * together})
    remedy = f"Set training.batch_size={' or '.join(map(str, sizes))}"
    if batch % replicas:
        return f"{remedy}."
    fitting = max(size for size in range(1, micro + 1) if batch // replicas % size == 0)
    return f"{remedy}, or training.micro_batch_size={fitting}."
