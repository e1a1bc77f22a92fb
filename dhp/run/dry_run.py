"""What a run would take, from the model's shape alone: layout, parameters and bytes of each rank, micro-batches."""

from __future__ import annotations

from collections.abc import Sequence

from dhp.config.resolve import micro_batches
from dhp.config.schema import Config, PartConfig
from dhp.models.registry import load_family
from dhp.models.shape import PartShape, config_source, part_shape
from dhp.parallel.tensor.styles import with_fused
from dhp.run.footprint import Footprint, HeadShape, RankBytes, by_stage, footprint, rank_bytes
from dhp.run.preflight import missing_data
from dhp.run.settings import degrees

_HEADINGS = ("part", "layout", "ranks", "parameters", "a rank", "of these whole", "weights", "gradients", "optimizer")


def dry_run(config: Config) -> str:
    """The table and notes to print. `config` went through `dhp.run.preflight.prepare`. Starts and writes nothing."""
    source = config_source(config.text.model_name)
    shapes = part_shapes(config, source)
    memory = footprints(config, source, shapes)
    rows = [_row(name, getattr(config, name), shapes[name], memory[name].states) for name in shapes]
    lines = [f"dry run of {config.name}", f"model          {config.text.model_name}"]
    if source != config.text.model_name:
        lines.append(f"its shape      {source}")
    lines += ["", *_aligned([_HEADINGS, *rows]), "", *_stages(config, shapes), "", *_devices(config, memory)]
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
    tower = with_fused(family.tower.tensor_plan, family.tower.fused)
    shared = family.decoder.kv_projections if tensor > family.decoder.kv_heads else ()
    return {
        "vision": part_shape(source, family.decoder.modules, config.vision.tensor, added_plan=tower),
        "text": part_shape(source, family.tower.modules, tensor, shared, family.decoder.tensor_plan),
    }


def footprints(config: Config, source: str, shapes: dict[str, PartShape]) -> dict[str, Footprint]:
    """What a rank of each part takes, by part."""
    family = load_family(source)
    text = family.config.get_text_config()
    layers = {"vision": len(family.tower.layers.kinds), "text": len(family.decoder.layers.kinds)}
    heads = {"vision": None, "text": HeadShape(text.vocab_size, text.hidden_size)}
    cuda = config.cluster.device != "cpu"
    return {
        name: footprint(getattr(config, name), shape, layers[name], heads[name], cuda) for name, shape in shapes.items()
    }


def _stages(config: Config, shapes: dict[str, PartShape]) -> list[str]:
    """What weights, gradients and optimizer of a rank would take under each ZeRO stage; the chosen one in brackets."""
    rows = [("states of a rank", *(f"zero_stage {stage}" for stage in range(4)))]
    for name, shape in shapes.items():
        part = getattr(config, name)
        found = {stage: "-" if held is None else gigabytes(held) for stage, held in by_stage(part, shape).items()}
        found[part.zero_stage] = f"[{gigabytes(rank_bytes(part, shape).total)}]"
        rows.append((name, *found.values()))
    return _aligned(rows)


def _row(name: str, part: PartConfig, shape: PartShape, memory: RankBytes) -> tuple[str, ...]:
    layout = str(degrees(part)) + (f", zero_stage {part.zero_stage}" if part.zero_stage else "") + f", {part.dtype}"
    counts = (shape.total, shape.per_rank, shape.replicated)
    held = (memory.weights, memory.gradients, memory.optimizer)
    return (name, layout, str(part.num_actors), *(f"{n:,}" for n in counts), *map(gigabytes, held))


def _devices(config: Config, memory: dict[str, Footprint]) -> list[str]:
    """How many devices, which ranks share one, and what the fullest holds."""
    ranks = {"vision": config.vision.num_actors, "text": config.text.num_actors}
    together = config.cluster.collocate
    count = max(ranks.values()) if together else sum(ranks.values())
    fullest = sum(m.total for m in memory.values()) if together else max(m.total for m in memory.values())
    shared = min(ranks.values()) if together else 0
    each = f"{shared} with a rank of both parts, {count - shared} with one rank" if together else "one rank each"
    return [
        f"devices        {count}: {each}",
        *(f"{name + ' rank':14} {_told(m)}" for name, m in memory.items()),
        f"fullest device {gigabytes(fullest)}; activations not included",
    ]


def _told(taken: Footprint) -> str:
    """`34.1 GB: states 30.0 GB, the loss 2.1 GB, …`."""
    parts = {
        "states": taken.states.total,
        "the loss's chunk": taken.loss,
        "gathered layers": taken.gathered,
        "context and communicators": taken.runtime,
    }
    named = ", ".join(f"{what} {gigabytes(count)}" for what, count in parts.items() if count)
    return f"{gigabytes(taken.total)}: {named}"


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
