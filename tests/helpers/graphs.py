"""Graphs of stages made by hand."""

from itertools import pairwise

from dhp.core.axes import Degrees
from dhp.core.graph import HIDDEN_STATES, Edge, Node, StageGraph, StageSpec, Tie

ONE = Degrees()


def make_graph(
    vision: Degrees = ONE,
    text: Degrees = ONE,
    stages: int = 1,
    chunks: int = 1,
    layers: int = 4,
    tower_layers: int = 4,
    vision_trains: bool | tuple[bool, ...] = True,
    text_trains: bool | tuple[bool, ...] = True,
    cuts: tuple[int, ...] = (),
    enters: dict[str, int] | None = None,
    tied: bool = False,
    tie_trained: bool = True,
    audio: Degrees | None = None,
    audio_layers: int = 1,
    audio_stages: int = 1,
    audio_trains: bool | tuple[bool, ...] = True,
    tower_stages: int = 1,
    leaves: dict[str, int] | None = None,
    batch: int = 1,
) -> StageGraph:
    """Vision, and text in so many stages of so many chunks each, that share devices. batch: micro-batches that encoders
    take at a time.

    text_trains, vision_trains, audio_trains: of each of its stages. leaves: the tower's layer behind which a tensor
    leaves, where it is not the last. cuts: of the text's layers; none: even ones. enters: the layer after which a
    tensor of the tower is added. audio: how an audio tower is split; None: there is none."""
    runs = stages * chunks
    bounds = [0, *(cuts or (layers * run // runs for run in range(1, runs))), layers]
    ranges = [range(first, end) for first, end in pairwise(bounds)]
    hears = (audio_trains,) * audio_stages if isinstance(audio_trains, bool) else audio_trains
    seen = (vision_trains,) * tower_stages if isinstance(vision_trains, bool) else vision_trains
    towers = [
        StageSpec(
            f"vision.{at}" if tower_stages > 1 else "vision",
            "vision",
            (range(tower_layers * at // tower_stages, tower_layers * (at + 1) // tower_stages),),
            vision,
            seen[at],
            range(at * vision.world, (at + 1) * vision.world),
        )
        for at in range(tower_stages)
    ]
    on = (text_trains,) * stages if isinstance(text_trains, bool) else text_trains
    parts = [
        StageSpec(
            f"text.{at}" if stages > 1 else "text",
            "text",
            tuple(ranges[at::stages]),
            text,
            on[at],
            range(at * text.world, (at + 1) * text.world),
        )
        for at in range(stages)
    ]
    nodes = [(Node(part.name, chunk), part.chunks[chunk]) for chunk in range(chunks) for part in parts]
    edges = [
        Edge(Node(before.name), Node(after.name), (HIDDEN_STATES,), any(seen[: at + 1]))
        for at, (before, after) in enumerate(pairwise(towers))
    ]
    last = tower_layers - 1
    for node, own in nodes:
        for at, tower in enumerate(towers):
            entering = [name for name, layer in {"embeddings": 0, **(enters or {})}.items() if layer in own]
            names = tuple(name for name in entering if (leaves or {}).get(name, last) in tower.layers)
            edges += [Edge(Node(tower.name), node, names, any(seen[: at + 1]), batch)] if names else []
    encoders = towers
    if audio is not None:
        heard = [
            StageSpec(
                "audio" if audio_stages == 1 else f"audio.{at}",
                "audio",
                (range(at * audio_layers // audio_stages, (at + 1) * audio_layers // audio_stages),),
                audio,
                hears[at],
                range(at * audio.world, (at + 1) * audio.world),
            )
            for at in range(audio_stages)
        ]
        encoders += heard
        edges += [
            Edge(Node(before.name), Node(after.name), (HIDDEN_STATES,), any(hears[: at + 1]))
            for at, (before, after) in enumerate(pairwise(heard))
        ]
        edges.append(Edge(Node(heard[-1].name), nodes[0][0], ("audio_embeddings",), any(hears), batch))
    trains = {part.name: part.trains for part in parts}
    back = any(seen) or (audio is not None and any(hears))
    for (before, _), (after, _) in pairwise(nodes):
        back = back or trains[before.stage]
        edges.append(Edge(before, after, (HIDDEN_STATES,), back))
    ties = (Tie(parts[0].name, parts[-1].name, tie_trained),) if tied and stages > 1 else ()
    return StageGraph((*encoders, *parts), tuple(edges), ties)
