"""The chain of stages that a configuration asks for: derived once, before any actor, from it and the model's shape."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from dhp.base.degrees import Degrees
from dhp.base.stages import HIDDEN_STATES, Chain, Edge, Node, StageSpec, Tie
from dhp.config.checks import check_cuts, check_stages
from dhp.config.resolved import resolved
from dhp.config.schema import Config, PartConfig
from dhp.models.family import Family
from dhp.models.shape import DecoderSizes, decoder_sizes
from dhp.models.tower import EMBEDDINGS


def make_chain(config: Config, family: Family, source: str) -> Chain:
    """The stages of a resolved configuration for the model of `source`, as `dhp.models.shape.config_source` gives it.

    Raises ConfigError for cuts that the model's layers do not admit.
    """
    sizes = decoder_sizes(source) if resolved(config.text.pipeline) > 1 else None
    vision = _vision(config, family)
    text = tuple(_text(config, _chunks(config.text, len(family.decoder.layers.kinds), sizes), vision))
    ties = (Tie(text[0].name, text[-1].name),) if sizes is not None and sizes.tied else ()
    return Chain((vision, *text), tuple(_edges(family, vision, text)), ties)


def degrees(part: PartConfig) -> Degrees:
    """How each stage of a resolved part is split."""
    axes = (part.data, part.ring, part.ulysses, part.tensor)
    return Degrees(*map(resolved, axes))


def even_cuts(sizes: DecoderSizes, stages: int) -> list[int]:
    """Where to cut the layers so that the largest stage has as few parameters as possible.

    Of several such cuts, the one whose first stages are smallest: they hold most micro-batches of 1F1B.

    What lies before the layers counts for the first stage, what lies behind them for the last; a tied weight for both.
    """
    count, (before, behind) = len(sizes.layers), _outside(sizes)
    sums = list(accumulate(sizes.layers, initial=0))

    def weight(first: int, end: int) -> int:
        own = sums[end] - sums[first]
        return own + (before if first == 0 else 0) + (behind if end == count else 0)

    # best[k][first]: the largest of k stages that hold the layers from `first` on, and where the first of them ends.
    best: list[dict[int, tuple[int, int]]] = [{}, {first: (weight(first, count), count) for first in range(count)}]
    for k in range(2, stages + 1):
        best.append(
            {
                first: min(
                    (max(weight(first, end), best[k - 1][end][0]), end) for end in range(first + 1, count - k + 2)
                )
                for first in range(count - k + 1)
            }
        )
    cuts, first = [], 0
    for k in range(stages, 1, -1):
        first = best[k][first][1]
        cuts.append(first)
    return cuts


def _outside(sizes: DecoderSizes) -> tuple[int, int]:
    return sizes.embedding, sizes.norm + sizes.head


def _vision(config: Config, family: Family) -> StageSpec:
    layers, split = len(family.tower.layers.kinds), degrees(config.vision)
    return StageSpec("vision", "vision", (range(layers),), split, config.vision.trainable, range(split.world))


def _text(config: Config, chunks: Sequence[range], vision: StageSpec) -> Iterator[StageSpec]:
    """Stage i of n holds chunks i, i + n, i + 2n, …; devices one after another, from the first where parts share."""
    split, count = degrees(config.text), resolved(config.text.pipeline)
    first = 0 if config.cluster.collocate else vision.devices.stop
    for at in range(count):
        name = f"text.{at}" if count > 1 else "text"
        devices = range(first + at * split.world, first + (at + 1) * split.world)
        yield StageSpec(name, "text", tuple(chunks[at::count]), split, config.text.trainable, devices)


def _chunks(text: PartConfig, layers: int, sizes: DecoderSizes | None) -> list[range]:
    """The runs of layers in the order in which a micro-batch comes by. Raises ConfigError."""
    stages = resolved(text.pipeline)
    runs = stages * text.virtual_stages
    if text.cuts is not None:
        check_cuts(text.cuts, layers)
        cuts = list(text.cuts)
    else:
        check_stages(layers, stages, text.virtual_stages)
        each = layers // runs
        cuts = [each * run for run in range(1, runs)]
        if text.virtual_stages == 1 and sizes is not None:
            cuts = even_cuts(sizes, runs)
    bounds = [0, *cuts, layers]
    return [range(first, end) for first, end in zip(bounds, bounds[1:])]


@dataclass(frozen=True)
class _Run:
    """A chunk of the text part and the node that computes it."""

    node: Node
    layers: range


def _edges(family: Family, vision: StageSpec, text: Sequence[StageSpec]) -> Iterator[Edge]:
    """Vision's tensors go where they enter, hidden states from run to run."""
    count = len(text[0].chunks)
    runs = [_Run(Node(stage.name, chunk), stage.chunks[chunk]) for chunk in range(count) for stage in text]
    enters = {EMBEDDINGS: 0, **family.decoder.enters}
    for run in runs:
        names = tuple(name for name in family.tower.tensors if enters[name] in run.layers)
        if names:
            yield Edge(vision.nodes[0], run.node, names, vision.trains)
    back = vision.trains or text[0].trains
    yield from (Edge(a.node, b.node, (HIDDEN_STATES,), back) for a, b in zip(runs, runs[1:]))
