"""Checks a resolved configuration against its model's shape."""

from collections.abc import Mapping
from typing import Any

from dhp.config.layout import check_mlp_chunks
from dhp.config.model_rules import check_layers, check_runs
from dhp.config.parts import decoder, parts, resolved
from dhp.config.ranges import INTERLEAVED
from dhp.config.schema import Config, PartConfig
from dhp.config.steps import micro_batches
from dhp.core.batch import PositionRange
from dhp.core.errors import ConfigError
from dhp.models.config_file import find_positions
from dhp.models.family import Family
from dhp.step.schedule import check_groups


def having_parts(config: Config, family: Family) -> Family:
    """The family in a run of this configuration. Raises ConfigError for a part that the model does not have."""
    for name, part in parts(config).items():
        if name not in family.parts:
            raise ConfigError(
                f"{name}.num_actors={part.num_actors} with a {family.config.model_type} model, which "
                f"has no {name} part here: its parts are {', '.join(family.parts)}. Leave the section {name} out"
            )
    return family.having(parts(config))


def check_fit(config: Config, family: Family) -> None:
    """Raises ConfigError where the degrees of a resolved configuration do not fit the model's heads and layers, its
    schedule the stages, or its rows the model's positions. family: having the run's parts. No model is made: it takes
    less than a millisecond."""
    for name, part in parts(config).items():
        check_part(name, part, family)
    check_row_length(config.data.max_tokens, find_positions(family.config))
    text = decoder(config)
    if config.training.schedule == INTERLEAVED:
        check_groups("text", resolved(text.pipeline), micro_batches(config))


def check_part(name: str, part: PartConfig, family: Family) -> None:
    """The same for the resolved section of one part by itself. Raises ConfigError."""
    own = family.parts[name]
    own.check(part)
    check_layers(f"{name}.recompute", resolved(part.recompute), len(own.layers.kinds))
    check_mlp_chunks(name, part, own.layers.mlp)
    check_runs(name, part, len(own.layers.kinds))


def check_row_length(max_tokens: int | None, positions: PositionRange | None) -> None:
    """Raises ConfigError where samples are allowed that the model has no positions for. Where tokens of a picture share
    positions, their number alone does not tell; a sample's own length is checked when it is read."""
    if max_tokens is None or positions is None or not positions.of_pictures or max_tokens <= positions.count:
        return
    raise ConfigError(
        f"data.max_tokens={max_tokens} is more than the {positions.count} positions that the model knows "
        f"(max_position_embeddings). Set data.max_tokens={positions.count}, or extend the model: max_positions and "
        "rope_theta of a training stage (stages), or its config.json"
    )


def check_plan(name: str, part: PartConfig, source: str, family: Family) -> None:
    """Raises ConfigError where DeepSpeed would have no plan to cut the part by, ModelError where it would be cut by
    styles whose gradients are not known to be exact."""
    from dhp.config.parts import degrees

    own = family.parts[name]
    if degrees(part).shares_experts:
        from dhp.models.empty import check_tensor_plan
        from dhp.parallel.expert.expert_shares import check_shares

        check_tensor_plan(source, family.outside(name), check_shares)
    if resolved(part.tensor) == 1:
        return  # and spare the time that making a large model takes, even without weights
    if part.parallelism == "autotp":  # DeepSpeed's layers follow transformers' plan of the model
        if own.tensor_plan:
            raise ConfigError(
                f"{name}.parallelism=autotp with a {family.config.model_type} model: transformers has no "
                "tensor-parallel plan of its decoder for DeepSpeed to follow. "
                f"Set {name}.parallelism=tensor, where dhp has its own."
            )
        return
    from dhp.engine.build import check_norms
    from dhp.models.empty import check_tensor_plan
    from dhp.parallel.tensor.styles import with_fused, with_shared_heads
    from dhp.parallel.tensor.tensor_plan import local_plan

    tensor = resolved(part.tensor)
    read = check_norms(own, tensor) if part.sequence_sharded_norms else local_plan
    plan = with_shared_heads(with_fused(own.tensor_plan, own.fused), own.shared_heads(tensor))

    def check(model: Any, plan: Mapping[str, str]) -> dict[str, str]:
        own.split_heads(model, tensor)
        return read(model, plan)

    check_tensor_plan(source, family.outside(name), check, plan)
