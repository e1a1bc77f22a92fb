"""Graphs of stages made by hand."""

from __future__ import annotations

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
    vision_trains: bool = True,
    text_trains: bool | tuple[bool, ...] = True,
    cuts: tuple[int, ...] = (),
    enters: dict[str, int] | None = None,
    tied: bool = False,
    tie_trained: bool = True,
    audio: Degrees | None = None,
    audio_layers: int = 1,
    audio_trains: bool = True,
) -> StageGraph:
    """Vision, and text in so many stages of so many chunks each, that share devices.

    text_trains: of each of its stages. cuts: of the text's layers; none: even ones. enters: the layer after which a
    tensor of the tower is added. audio: how an audio tower is split; None: there is none.
    """
    runs = stages * chunks
    bounds = [0, *(cuts or (layers * run // runs for run in range(1, runs))), layers]
    ranges = [range(first, end) for first, end in pairwise(bounds)]
    tower = StageSpec("vision", "vision", (range(tower_layers),), vision, vision_trains, range(vision.world))
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
    edges = []
    for node, own in nodes:
        names = tuple(name for name, layer in {"embeddings": 0, **(enters or {})}.items() if layer in own)
        edges += [Edge(Node("vision"), node, names, vision_trains)] if names else []
    encoders = [tower]
    if audio is not None:
        encoders.append(StageSpec("audio", "audio", (range(audio_layers),), audio, audio_trains, range(audio.world)))
        edges.append(Edge(Node("audio"), nodes[0][0], ("audio_embeddings",), audio_trains))
    trains = {part.name: part.trains for part in parts}
    back = vision_trains or (audio is not None and audio_trains)
    for (before, _), (after, _) in pairwise(nodes):
        back = back or trains[before.stage]
        edges.append(Edge(before, after, (HIDDEN_STATES,), back))
    ties = (Tie(parts[0].name, parts[-1].name, tie_trained),) if tied and stages > 1 else ()
    return StageGraph((*encoders, *parts), tuple(edges), ties)
