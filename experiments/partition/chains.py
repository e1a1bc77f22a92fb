"""A chain over the tower and the decoder of Qwen2.5-VL 7B as a run plans it, by each method: no weights, no device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dhp.config.command_line import compose_config
from dhp.config.parts import model_name
from dhp.config.resolve import resolve
from dhp.models.pretrained import config_source
from dhp.trainer.expected_step import expected_step
from dhp.trainer.plan import plan_run
from experiments import baselines  # noqa: F401  it registers profile and layers
from experiments.pair import TEXT, VISION

METHODS = ("exact", "bmp", "profile", "layers", "parameters")


@dataclass(frozen=True)
class Asked:
    """Stages of the tower and of the decoder, of which two share a device, and the micro-batches of a step."""

    vision: int
    text: int
    micro_batches: int


CHAINS = (Asked(2, 3, 8), Asked(3, 4, 16), Asked(2, 6, 16))


def chains(every: Sequence[Asked] = CHAINS, methods: Sequence[str] = METHODS) -> Iterator[dict[str, Any]]:
    """A row for each chain and method: layers of each stage, and the step in assumed seconds."""
    for asked in every:
        given = [f"vision.num_actors={asked.vision}", f"vision.pipeline={asked.vision}", "vision.parallelism=pipeline"]
        given += [f"text.num_actors={asked.text}", f"text.pipeline={asked.text}", "text.parallelism=pipeline"]
        given += ["cluster.chain=true", "vision.zero_stage=0", "text.zero_stage=0", "training.schedule=1f1b"]
        given += [f"training.batch_size={asked.micro_batches}", "training.micro_batch_size=1", "cluster.device=cuda"]
        given += ["data.limits.text=null", "data.limits.vision=null"]  # a sample a micro-batch
        for method in methods:
            overrides = [*given, f"text.partition={method}"]
            config = resolve(compose_config("qwen2_5_vl_7b", overrides=overrides))
            plan = plan_run(config, config_source(model_name(config)))
            step = expected_step(plan)
            assert step is not None  # a tower that is known by its patches
            layers = {part: [len(stage.layers) for stage in plan.graph.of_part(part)] for part in (VISION, TEXT)}
            yield {
                "question": "chains", "model": "Qwen2.5-VL 7B", "stages": f"{asked.vision}+{asked.text}",
                "micro_batches": asked.micro_batches, "method": method, **layers, "step_s": round(step.step_s, 3),
                "bubble": round(step.bubble, 3),
            }  # fmt: skip
