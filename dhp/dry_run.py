"""What a run would take, from the model's shape alone: layout, parameters and bytes of each rank, micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dhp.config.resolve import micro_batches
from dhp.config.schema import Config, PartConfig
from dhp.errors import ConfigError
from dhp.models.registry import load_family
from dhp.models.shape import PartShape, config_source, part_shape
from dhp.parallel.tensor import with_fused
from dhp.preflight import missing_data
from dhp.wiring import degrees

_VALUE_BYTES = {"bfloat16": 2, "float32": 4, "float64": 8}
_SUM_BYTES = 4  # gradient sums and optimizer state are never in 16 bits
_HEADINGS = ("part", "layout", "ranks", "parameters", "a rank", "of these whole", "weights", "gradients", "optimizer")


@dataclass(frozen=True)
class RankBytes:
    """Bytes that one rank of a part keeps between steps; gradients at the end of the backward pass."""

    weights: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer


def dry_run(config: Config) -> str:
    """The table and notes to print. `config` went through `dhp.preflight.prepare`. Starts nothing, writes nothing."""
    source = config_source(config.text.model_name)
    shapes = part_shapes(config, source)
    memory = {name: rank_bytes(getattr(config, name), shape) for name, shape in shapes.items()}
    rows = [_row(name, getattr(config, name), shapes[name], memory[name]) for name in shapes]
    lines = [f"dry run of {config.name}", f"model          {config.text.model_name}"]
    if source != config.text.model_name:
        lines.append(f"its shape      {source}")
    lines += ["", *_aligned([_HEADINGS, *rows]), "", *_devices(config, memory)]
    training = config.training
    lines.append(
        f"a step         {training.batch_size} samples = text.data {config.text.data} × micro_batch_size "
        f"{training.micro_batch_size} × {micro_batches(config)} micro-batches"
    )
    missing = missing_data(config)
    lines += [f"data           {message}" for message in missing]
    passed = "every check but these of the data passed" if missing else "every check passed"
    return "\n".join([*lines, "", f"{passed}; nothing was started"])


def part_shapes(config: Config, source: str) -> dict[str, PartShape]:
    """Parameters of both parts in the layout that `config` asks for; `source` as `config_source` gives it."""
    family, tensor = load_family(source), config.text.tensor
    tower = with_fused(family.vision_tensor_plan, family.vision_fused)
    shared = family.text_kv_projections if tensor > family.text_kv_heads else ()
    return {
        "vision": part_shape(source, family.text_modules, config.vision.tensor, added_plan=tower),
        "text": part_shape(source, family.vision_modules, tensor, shared),
    }


def rank_bytes(part: PartConfig, shape: PartShape) -> RankBytes:
    """Weights, gradients and AdamW's state of one rank.

    AdamW keeps two averages of each parameter, and its own copy of the weights where it may not update the module's: in
    16 bits, where sums and state have 32, and under ZeRO, whose ranks update a share and then exchange it. Stage 1 cuts
    the optimizer to the share, stage 2 the gradients too, stage 3 the weights too, so that in 32 bits they need no
    copy. Raises ConfigError for a number format whose memory is not known here.
    """
    if part.dtype not in _VALUE_BYTES:
        raise ConfigError(f"dtype={part.dtype}: a dry run knows {' and '.join(_VALUE_BYTES)} only; choose one")
    size = _VALUE_BYTES[part.dtype]
    exact = max(size, _SUM_BYTES)
    whole, stage = shape.per_rank, part.zero_stage
    share = -(-whole // (part.num_actors // part.tensor)) if stage else whole
    copies = int(size < exact or stage in (1, 2))
    weights = size * (share if stage == 3 else whole)
    return RankBytes(weights, exact * (share if stage >= 2 else whole), exact * (2 + copies) * share)


def _row(name: str, part: PartConfig, shape: PartShape, memory: RankBytes) -> tuple[str, ...]:
    layout = str(degrees(part)) + (f", zero_stage {part.zero_stage}" if part.zero_stage else "") + f", {part.dtype}"
    counts = (shape.total, shape.per_rank, shape.replicated)
    held = (memory.weights, memory.gradients, memory.optimizer)
    return (name, layout, str(part.num_actors), *(f"{n:,}" for n in counts), *map(gigabytes, held))


def _devices(config: Config, memory: dict[str, RankBytes]) -> list[str]:
    """How many devices, which ranks share one, and what the fullest holds."""
    ranks = {"vision": config.vision.num_actors, "text": config.text.num_actors}
    together = config.cluster.collocate
    count = max(ranks.values()) if together else sum(ranks.values())
    fullest = sum(m.total for m in memory.values()) if together else max(m.total for m in memory.values())
    shared = min(ranks.values()) if together else 0
    each = f"{shared} with a rank of both parts, {count - shared} with one rank" if together else "one rank each"
    return [
        f"devices        {count}: {each}",
        *(f"{name + ' rank':14} {gigabytes(m.total)}" for name, m in memory.items()),
        f"fullest device {gigabytes(fullest)}; activations not included",
    ]


def gigabytes(count: int) -> str:
    """`26.7 GB` of 10⁹ bytes, or megabytes below one."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.3f} MB"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns as wide as their widest entry; text to the left, numbers to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(w) if at < 2 else cell.rjust(w) for at, (cell, w) in enumerate(zip(row, widths))).rstrip()
        for row in rows
    ]
