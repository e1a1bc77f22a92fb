"""Rules between degrees and a model's shape, as plain numbers."""

from collections.abc import Collection

from dhp.config.layout import LAYERS, read_choices
from dhp.config.parts import resolved
from dhp.config.schema import PartConfig
from dhp.core.errors import ConfigError
from dhp.core.heads import head_range, share_heads


def check_cuts(name: str, cuts: list[int], layers: int) -> None:
    """Cuts of the `layers` layers of part `name`: each run of layers has one at least. Raises ConfigError."""
    bounds = [0, *cuts, layers]
    if any(after <= before for before, after in zip(bounds, bounds[1:])):
        raise ConfigError(
            f"{name}.cuts={list(cuts)} cannot cut the {layers} layers of {name}: 0 < "
            f"{' < '.join(map(str, cuts))} < layers({layers}) does not hold. Give layers from 1 to {layers - 1}, each "
            "larger than the one before. Nothing can be cut but between layers: what is before or behind them goes "
            "with the first and the last one."
        )


def check_stages(name: str, layers: int, pipeline: int, virtual: int) -> None:
    """Every run of layers has one at least, and runs of virtual stages have as many each. Raises ConfigError."""
    runs = pipeline * virtual
    if runs > layers:
        fewer = (
            f"{name}.virtual_stages to {layers // pipeline} at most, or " if virtual > 1 and layers >= pipeline else ""
        )
        raise ConfigError(
            f"{name}.pipeline={pipeline} with {name}.virtual_stages={virtual} needs a layer for each run of layers, "
            f"but {name} has {layers}: pipeline({pipeline}) × virtual_stages({virtual}) = {runs} > "
            f"layers({layers}). Set {fewer}{name}.pipeline to {layers // virtual} at most."
        )
    if virtual > 1 and layers % runs:
        possible = [n for n in _divisors(layers // pipeline)] if layers % pipeline == 0 else []
        remedy = f"{name}.virtual_stages to one of {possible}, " if possible else ""
        raise ConfigError(
            f"{name}.virtual_stages={virtual} cannot interleave the {layers} layers of {name}: layers({layers}) % "
            f"(pipeline({pipeline}) × virtual_stages({virtual}) = {runs}) = {layers % runs} != 0. Set {remedy}"
            f"{name}.pipeline to one of {_divisors(layers)}, or give {name}.cuts."
        )


def check_runs(name: str, part: PartConfig, layers: int) -> None:
    """Where the resolved part `name` is cut by hand, the cuts go with its `layers` layers; else each run of layers has
    one at least, and by layers as many as the others. Raises ConfigError."""
    pipeline, virtual = resolved(part.pipeline), part.virtual_stages
    if part.cuts is not None:
        check_cuts(name, part.cuts, layers)
    elif part.partition in (None, LAYERS) or pipeline * virtual > layers:
        check_stages(name, layers, pipeline, virtual)


def check_layers(key: str, text: str, layers: int) -> None:
    """`text`, as in `dhp.config.layout`, must name none but the part's `layers` layers. Raises ConfigError."""
    read_choices(text, layers, key)


def check_tower(heads: int, ulysses: int, tensor: int) -> None:
    """Tensor parallelism gives each actor as many of the `heads` of the vision tower, and Ulysses some of these. A ring
    needs nothing. Raises ConfigError."""
    if heads % tensor:
        raise ConfigError(
            f"vision.tensor={tensor} cannot split the vision tower's {heads} attention heads evenly: "
            f"heads({heads}) % tensor({tensor}) = {heads % tensor} != 0. "
            f"Set vision.tensor to one of {_divisors(heads)} and vision.num_actors to match."
        )
    _check_busy("vision", [(heads // tensor, heads // tensor)], ulysses)


def _check_busy(name: str, of_ranks: list[tuple[int, int]], ulysses: int) -> None:
    """Raises ConfigError where Ulysses would leave actors without any of the heads of queries, and of keys and values,
    that each rank of tensor parallelism has."""
    fitting = [n for n in range(1, ulysses + 1) if all(share_heads(*of_rank, n).busy == n for of_rank in of_ranks)]
    if ulysses not in fitting:
        heads, kv_heads = min(of_ranks)
        shares = share_heads(heads, kv_heads, ulysses)
        raise ConfigError(
            f"{name}.ulysses={ulysses} gives {heads} query and {kv_heads} key/value heads to {shares.busy} actors, "
            f"{shares.a_rank} query heads to each, and none to the other {ulysses - shares.busy}: set {name}.ulysses="
            f"{max(fitting)} and {name}.num_actors to match, or divide the sequence further by {name}.ring, which "
            "needs no heads."
        )


def check_tensor(heads: int, kv_heads: int, tensor: int) -> None:
    """Tensor parallelism gives each actor a query head at least, and where they do not divide, whole subsets of them
    (`dhp.core.heads.head_range`). Raises ConfigError."""
    if tensor > heads:
        raise ConfigError(
            f"text.tensor={tensor} leaves actors without any of the text decoder's {heads} attention heads: set "
            f"text.tensor to {heads} at most, and text.num_actors to match."
        )


def check_experts(experts: int, text: PartConfig) -> None:
    """Sharing experts out gives each replica as many: `expert` divides `experts` (of each layer; 0: there are none) and
    the replicas. Raises ConfigError."""
    expert, data = text.expert, resolved(text.data)
    if expert == 1:
        return
    if not experts:
        raise ConfigError(f"text.expert={expert}: the text decoder has no experts to share out. Set text.expert=1.")
    if experts % expert or data % expert:
        possible = [n for n in _divisors(experts) if data % n == 0]
        near = min(possible, key=lambda n: (abs(n - expert), -n))
        raise ConfigError(
            f"text.expert={expert} cannot share out the text decoder's {experts} experts among neighbours of "
            f"text.data={data} replicas: experts({experts}) % expert({expert}) = {experts % expert} and "
            f"data({data}) % expert({expert}) = {data % expert}, and both must be 0. Set text.expert={near}, the "
            "nearest that divides both, or change text.data."
        )


def check_expert_width(width: int, tensor: int) -> None:
    """Tensor parallelism cuts the inner width of each expert. Raises ConfigError."""
    if width % tensor:
        raise ConfigError(
            f"text.tensor={tensor} cannot cut the text decoder's experts, which are {width} wide inside: "
            f"width({width}) % tensor({tensor}) = {width % tensor} != 0. Set text.tensor to one of {_divisors(width)} "
            "and text.num_actors to match, or share whole experts out with text.expert."
        )


def check_autotp(kv_heads: int, tensor: int) -> None:
    """DeepSpeed's tensor parallelism gives each actor whole key/value heads: `kv_heads` a multiple of `tensor`.

    Raises ConfigError."""
    if kv_heads % tensor:
        raise ConfigError(
            f"text.parallelism=autotp with text.tensor={tensor} cannot split the text decoder's {kv_heads} key/value "
            f"heads: kv_heads({kv_heads}) % tensor({tensor}) = {kv_heads % tensor} != 0, and DeepSpeed would leave "
            f"actors without any. Set text.parallelism=tensor, where actors share heads, or text.tensor to one of "
            f"{_divisors(kv_heads)} and text.num_actors to match."
        )


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


_BY_LENGTH = ("dynamic", "longrope")  # kinds of rotary positions that turn otherwise in longer rows


def shares_sequence(asked: PartConfig) -> bool:
    """Whether several actors share a sequence."""
    return resolved(asked.ring) * resolved(asked.ulysses) > 1


def check_heads(heads: int, kv_heads: int, asked: PartConfig) -> None:
    """Ulysses gives each actor heads of those that tensor parallelism leaves to it. Raises ConfigError."""
    tensor = resolved(asked.tensor)
    ranges = [head_range(heads, kv_heads, tensor, rank) for rank in range(tensor)]
    _check_busy("text", [(own.end - own.first, sum(own.repeats)) for own in ranges], resolved(asked.ulysses))


def check_positions(rope_types: set[str], scaled: bool) -> None:
    """Each actor sees its own share of a row's positions. Raises ConfigError for what follows from the longest of them,
    or from a token's place among the actor's own. scaled: queries of some layers are scaled by their place."""
    for kind in sorted(rope_types.intersection(_BY_LENGTH)):
        raise ConfigError(
            f"text.parallelism=sequence of a decoder with rotary positions of the type {kind}, which turn by the "
            "longest position of a row: actors that share one would disagree. Set text.ulysses=1 and text.ring=1, or "
            "another rope_type in text_config of the model's config.json, as yarn."
        )
    if scaled:
        raise ConfigError(
            "text.parallelism=sequence of a decoder that scales queries by their place in the row "
            "(attn_temperature_tuning): an actor knows its own share of it alone. Set text.ulysses=1 and text.ring=1."
        )


def check_mixers(unknown: Collection[str], asked: PartConfig) -> None:
    """Raises ConfigError where ranks share a row and it is not known here how they do in layers that carry state along
    it. unknown: classes of such layers."""
    if unknown:
        raise ConfigError(
            f"text.ulysses={asked.ulysses} and text.ring={asked.ring} of a decoder with layers that carry state along "
            f"the row ({', '.join(unknown)}), of which it is not known here how ranks share them. Set both to 1; "
            "text.tensor and text.pipeline divide the model."
        )


def check_layers_of_rows(blocks: bool, balance: float, asked: PartConfig) -> None:
    """Raises ConfigError for layers that need a whole row. blocks: tokens see each other both ways; balance:
    coefficient of a load-balancing loss, 0: none."""
    given = f"text.ulysses={asked.ulysses} and text.ring={asked.ring}"
    if blocks and resolved(asked.ring) > 1:
        raise ConfigError(
            f"{given} of a decoder in which tokens of an image see each other both ways: the ring computes causal "
            "attention alone. Set text.ring=1 and text.ulysses higher."
        )
    if balance:
        raise ConfigError(
            f"{given} of a decoder with a load-balancing loss (output_router_logits=true, "
            f"router_aux_loss_coef={balance} in its configuration): it is a product of means over whole samples. Set "
            "both to 1, or output_router_logits to false in text_config of the model's config.json to train without it."
        )
