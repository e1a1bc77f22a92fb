"""A layout as a user says it, by keys of the configuration, and a step's data for it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dhp.batch.collate import Collator
from dhp.batch.shard import BatchSharder
from dhp.config.command_line import compose_config
from dhp.config.resolve import resolve
from dhp.config.schema import Config
from dhp.core.batch import IGNORED, StepData
from dhp.core.graph import StageGraph, StageSpec
from dhp.data.sample.sample import Sample
from dhp.data.sampling.dataset import StepSamples
from dhp.engine.stage_settings import StageSettings
from dhp.models.family import Family
from dhp.models.registry import load_family
from dhp.plan.batches import feed_settings
from dhp.plan.run_plan import plan_run
from dhp.plan.trainable import adapters_of, training_rules
from dhp.trainer.settings import stage_settings

# One rank a part, where the keys of a layout say nothing else. There are no data: a step is dealt by hand.
ONE_EACH = (
    "tiny_assets=null", "data.datasets=[made]", "data.data_registry={made:{annotation_path:made.json}}",
    "data.packing=true", "training.dry_run=true",
    *(
        f"{part}.{said}"
        for part in ("vision", "text")
        for said in ("num_actors=1", "parallelism=data", "zero_stage=0", "dtype=bfloat16", "recompute=none")
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Sizes:
    """Of a replica's row: samples of one image of this grid, and so many tokens of text behind it, the half of which
    are targets."""

    samples: int
    grid: tuple[int, int, int]
    text_tokens: int


@dataclass(frozen=True)
class Layout:
    """A resolved configuration and the stages that it asks for. model: a directory, or the file of a shipped shape."""

    model: str
    config: Config
    family: Family
    graph: StageGraph

    def settings(self, stage: StageSpec) -> StageSettings:
        """As a run on GPUs makes them."""
        rules = training_rules(self.config.training, self.family, adapters_of(self.config))
        return stage_settings(self.config, self.graph, stage, "cuda", 10, rules=rules)

    def shard(self, sizes: Sizes) -> StepData:
        """One micro-batch for all ranks, of a row for each replica."""
        feed = feed_settings(self.config)
        row = tuple(_sample(sizes, number, self.family) for number in range(sizes.samples))
        dealer = BatchSharder(self.family, Collator(self.family, 0, feed.data.packing), feed.division)
        return dealer.shard(StepSamples(0, 0, ((row,) * feed.layout.replicas,), ()))


def lay_out(model: str, keys: Sequence[str] = ()) -> Layout:
    """What `keys` say of the model, as `text.pipeline=2`. Raises what a run raises for keys that do not go together."""
    named = [f"{part}.model_name={model}" for part in ("vision", "text")]
    config = resolve(compose_config("tiny", overrides=[*ONE_EACH, *named, *keys]), reads=False)
    family = load_family(model)
    return Layout(model, config, family, plan_run(config, model).graph)


def _sample(sizes: Sizes, number: int, family: Family) -> Sample:
    frames, height, width = sizes.grid
    patches = frames * height * width
    rng, token = np.random.default_rng(number), family.processor.image_token_id
    text = rng.integers(3, 300, sizes.text_tokens)
    ids = np.concatenate([text[:2], np.full(patches // family.tower.merge_unit, token), text[2:]]).astype(np.int64)
    labels = np.where(np.arange(len(ids)) < len(ids) - sizes.text_tokens // 2, IGNORED, ids)
    pixels = np.zeros((patches, family.tower.patch_dim), dtype=np.float32)
    return Sample("made", number, ids, labels, (ids == token).astype(np.int64), (pixels,), (sizes.grid,))
