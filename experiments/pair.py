"""One vision and one text stage, made by hand: their chain, their settings, and a step's data as they take it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dhp.base.degrees import Degrees
from dhp.base.messages import StepData
from dhp.base.stages import Chain, Edge, Node, StageSpec
from dhp.config.recompute import read_choices
from dhp.models.family import Family
from dhp.step.stages import Batch
from dhp.trainers.settings import ALL, NOTHING, StageSettings, UpdateSettings

VISION, TEXT = "vision", "text"
ONE = Degrees()


def make_pair(
    vision: Degrees = ONE,
    text: Degrees = ONE,
    tower_layers: int = 1,
    layers: int = 1,
    tensors: tuple[str, ...] = ("embeddings",),
    collocate: bool = True,
    vision_trains: bool = True,
) -> Chain:
    """The whole tower and the whole decoder. collocate: on the same devices, from the first one on."""
    first = 0 if collocate else vision.world
    tower = StageSpec(VISION, VISION, (range(tower_layers),), vision, vision_trains, range(vision.world))
    decoder = StageSpec(TEXT, TEXT, (range(layers),), text, True, range(first, first + text.world))
    return Chain((tower, decoder), (Edge(Node(VISION), Node(TEXT), tensors, vision_trains),))


def pair_of(
    family: Family, vision: Degrees = ONE, text: Degrees = ONE, collocate: bool = True, train: str = ALL
) -> Chain:
    """`make_pair` for a model. train: what of the tower."""
    depths = len(family.tower.layers.kinds), len(family.decoder.layers.kinds)
    return make_pair(vision, text, *depths, family.tower.tensors, collocate, train != NOTHING)


def settings_of(
    chain: Chain, stage: str, model: str, update: UpdateSettings, recompute: str = "none", **changes: Any
) -> StageSettings:
    """Of one stage: float32 on a CPU, packed rows, all of it trained, nothing cut. recompute: as a part's key says it;
    changes: of any other setting."""
    spec = chain.stage(stage)
    given = {
        "dtype": "float32",
        "device": "cpu",
        "measure": False,
        "train": ALL,
        "zero_stage": 0,
        "zero_engine": "deepspeed",
        "autotp": False,
        "packing": True,
        "seed": 0,
    }
    choices = read_choices(recompute, len(spec.layers))
    return StageSettings(spec=spec, chain=chain, model_name=model, recompute=choices, update=update, **given | changes)


def as_batch(data: StepData, put: Callable[[Any], Any] = lambda value: value) -> Batch:
    """What `dhp.step.step.train_step` takes. put: a value → what the groups are called with, as `ray.put`."""
    work = {part: [[put(shard) for shard in row] for row in rows] for part, rows in data.work.items()}
    return Batch(put(data.info), work, data.routes)
