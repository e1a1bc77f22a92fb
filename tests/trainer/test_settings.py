"""What the actors of a run are told of its configuration."""

from __future__ import annotations

import shlex
from dataclasses import fields
from pathlib import Path

import pytest

from dhp.batch.encoder_shards import Split
from dhp.config.command_line import compose_config, to_yaml
from dhp.config.resolve import resolve
from dhp.config.run_dir import check_run_dir
from dhp.core.axes import Degrees
from dhp.core.parameters import AdapterSettings, Selector, TrainingRules
from dhp.core.text import own_command
from dhp.data.sampling.sampler import BalanceSettings, BatchLayout
from dhp.models.flops import NO_BACKWARD, MatmulShare, TrainedShare
from dhp.observe.metrics import StepMetrics
from dhp.observe.recorder import Recorder
from dhp.plan.batches import feed_settings, passes_of
from dhp.plan.count.counted_model import count_model
from dhp.plan.run_plan import plan_run
from dhp.trainer.settings import kept_settings, resume_line, stage_settings
from tests.helpers.graphs import make_graph

OVERRIDES = ["data.datasets=[shapes,'shapes%50']", "data.max_tokens=900", "data.video_fps=1", "data.allow_http=true"]


def test_how_samples_are_read_reaches_the_dataset_actor() -> None:
    settings = feed_settings(resolve(compose_config("tiny", overrides=OVERRIDES)))
    data = settings.data
    assert data.datasets == ["shapes", "shapes%50"]
    assert (data.allow_http, data.max_tokens, data.video_fps, data.video_whole_frames) == (True, 900, 1.0, 256)


def test_how_prompts_are_written_reaches_the_dataset_actor(tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text("{{ messages }}")  # read here: nodes need no file
    own = [f"data.chat_template={tmp_path / 'own.jinja'}", "data.system_prompt=''", "data.learn_empty_thoughts=true"]
    data = feed_settings(resolve(compose_config("tiny", overrides=own))).data
    assert (data.system_prompt, data.chat_template, data.learn_empty_thoughts) == ("", "{{ messages }}", True)


NOTHING_AS_BY_DEFAULT = [
    *("seed=11", "memory.accounting=true", "memory.budget_gib=1", "cluster.device=cpu", "plugins=[mine]"),
    *("vision.model_name=a/model", "text.model_name=a/model"),
    *("vision.parallelism=sequence", "vision.num_actors=24", "vision.data=2", "vision.ring=3", "vision.ulysses=2"),
    *(
        "vision.tensor=2",
        "vision.dtype=float64",
        "vision.zero_stage=0",
        "vision.recompute=light",
        "training.deterministic=true",
        "vision.mlp_chunks=4",
    ),
    *("vision.attention_backend=sdpa", "training.frozen=[vision]", "vision.lora.rank=4", "vision.lora.rslora=true"),
    *("text.parallelism=autotp", "text.num_actors=6", "text.data=3", "text.tensor=2", "text.dtype=bfloat16"),
    *(
        "text.recompute=mlp:0",
        "vision.kernels='rotary:plain'",
        "text.kernels='norm:written,gate:plain'",
        "text.mlp_chunks=2",
        "text.sequence_groups=one",
        "training.batch_size=30",
        "training.micro_batch_size=5",
    ),
    *("text.state_bytes=12", "text.host_moments=true"),
    *("data.min_pixels=4000", "data.max_pixels=90000", "data.packing=false", "data.shuffle=false"),
    *("data.cache_dir=somewhere", "data.max_tokens=900", "data.video_fps=1.5", "data.video_max_frames=12"),
    *("data.video_max_pixels=7000", "data.video_whole_frames=31", "data.allow_http=true", "data.on_bad_sample=skip"),
]


def test_every_setting_of_a_stage_comes_from_its_own_part(tiny_assets: Path) -> None:
    config = resolve(compose_config("tiny", overrides=NOTHING_AS_BY_DEFAULT))
    tower = Degrees(data=2, ring=3, ulysses=2, tensor=2)
    graph = make_graph(tower, Degrees(data=3, tensor=2), layers=2, tower_layers=2)
    rules = TrainingRules(frozen=(Selector("vision", ("model.visual",), ("model.visual.merger",)),))
    found = {s.name: stage_settings(config, graph, s, "cuda", 40, Path("step_7"), rules) for s in graph.stages}
    shared = {"config": config, "graph": graph, "device": "cuda", "measure": True, "rules": rules}
    shared |= {"features": None, "resume_states": True}
    own = {
        "vision": {
            "recompute": ("light", "light"),
            "resume_from": "step_7/vision",
            "adapters": AdapterSettings(4, 8.0, rslora=True),
        },
        "text": {"recompute": ("mlp", "none"), "resume_from": "step_7/text", "adapters": None},
    }
    kernels = {
        "vision": {"norm": "auto", "rotary": "plain", "gate": "auto"},
        "text": {"norm": "written", "rotary": "auto", "gate": "plain"},
    }
    for name, settings in found.items():
        told = {field.name: getattr(settings, field.name) for field in fields(settings)}
        del told["update"]
        assert told == shared | own[name] | {"spec": graph.stage(name)}
        assert settings.part is getattr(config, name) and settings.kernels == kernels[name]
        assert settings.exclusive_sums  # stages that share GPUs


def test_who_answers_reads_no_states_and_trains_nothing(tiny_assets: Path) -> None:
    config = resolve(
        compose_config("tiny", overrides=[f"{part}.model_name={tiny_assets / 'model'}" for part in ("vision", "text")])
    )
    graph = plan_run(config, trains=False).graph
    assert not any(stage.trains for stage in graph.stages) and not any(edge.gradients for edge in graph.edges)
    settings = stage_settings(config, graph, graph.stages[0], "cpu", 1, Path("step_7"), states=False)
    assert (settings.resume_from, settings.resume_states) == ("step_7/vision", False)


def test_a_stage_recomputes_what_its_own_layers_are_told() -> None:
    cut = ["text.parallelism=pipeline", "text.num_actors=2", "text.recompute='mlp:0-1,all:3'"]
    config = resolve(compose_config("tiny", overrides=cut))
    graph = make_graph(stages=2, chunks=2, layers=4)
    found = [stage_settings(config, graph, s, "cpu", 1).recompute for s in graph.of_part("text")]
    assert found == [("mlp", "none"), ("mlp", "all")]


def test_a_frozen_tower_keeps_nothing_to_recompute() -> None:
    frozen = ["vision.zero_stage=0", "vision.recompute=auto", "memory.budget_gib=1"]
    config = resolve(compose_config("tiny", overrides=frozen))
    graph = make_graph(vision_trains=False)
    settings = stage_settings(config, graph, graph.stage("vision"), "cpu", 1)
    assert (settings.measure, set(settings.recompute)) == (False, {"none"})


@pytest.mark.parametrize("stages", [(1, 2), (3, 1)])
def test_each_part_has_its_own_stage_of_zero(stages: tuple[int, int]) -> None:
    config = compose_config("tiny", overrides=[
        *("vision.parallelism=data", f"vision.zero_stage={stages[0]}"),
        *("text.parallelism=data", f"text.zero_stage={stages[1]}"),
    ])  # fmt: skip
    config, graph = resolve(config), make_graph()
    assert tuple(stage_settings(config, graph, s, "cpu", 1).part.zero_stage for s in graph.stages) == stages


def test_every_setting_of_the_data_reaches_the_dataset_actor() -> None:
    config = resolve(compose_config("tiny", overrides=NOTHING_AS_BY_DEFAULT))
    settings = feed_settings(config, passes={"vision": NO_BACKWARD})
    found = {field.name: getattr(settings, field.name) for field in fields(settings)}
    assert found == {
        "model_name": "a/model",
        "data": config.data,
        "layout": BatchLayout(replicas=3, micro_batches=2, micro_batch_size=5),
        "encoders": {"vision": Split(2, 6, "float32", None)},  # near whom is known once the ranks have their devices
        "seed": 11,
        "balancing": BalanceSettings(),
        "passes": {"vision": NO_BACKWARD},
        "features": None,  # which a run alone looks for
        "text": Degrees(data=3, tensor=2),
        "sequence_groups": "one",
        "even_calls": False,
        "exchange": "",
        "objective": "sft",
        "drawing": (),
        "plugins": ("mine",),
    }


def test_parts_whose_adapters_drop_reach_the_dataset_actor() -> None:
    own = ["text.lora.rank=2", "text.lora.dropout=0.1", "vision.lora.rank=2"]
    assert feed_settings(resolve(compose_config("tiny", overrides=own))).drawing == ("text",)


def test_what_is_computed_follows_from_what_is_trained(made_model: str) -> None:
    names = [f"{part}.model_name={made_model}" for part in ("vision", "text")]
    made = lambda *own: passes_of(count_model(resolve(compose_config("tiny", overrides=[*names, *own]))))
    assert made() == {}
    found = made("training.frozen=[vision,projector]")
    assert found == {"vision": NO_BACKWARD, "text": TrainedShare(entering=MatmulShare(inputs=0.0))}
    adapted = made("training.frozen=[vision,projector]", "text.lora.rank=2")["text"]
    assert adapted.layers.forward - 1 == pytest.approx(adapted.layers.weights) and 0 < adapted.layers.weights < 0.2
    assert adapted.ending == MatmulShare(weights=0.0)


def test_how_rows_are_balanced_reaches_the_dataset_actor() -> None:
    limits = {"text": 5000, "vision": 3000, "full_text": 4800, "full_vision": 2900}
    own = ["data.balance=isf", "data.balance_window=500", *(f"data.limits.{key}={n}" for key, n in limits.items())]
    settings = feed_settings(resolve(compose_config("tiny", overrides=own)))
    assert settings.balancing == BalanceSettings("isf", 3000, 5000, 2900, 4800, 500)


def test_a_resumed_run_keeps_shares_and_weights() -> None:
    """Both decide which samples a step has; a weight of one is not told, as before there were weights."""
    plain = kept_settings(resolve(compose_config("tiny", overrides=OVERRIDES)))
    assert plain["data.datasets"] == ["shapes", "shapes%50"]
    heavy = compose_config("tiny", overrides=[*OVERRIDES, "data.data_registry.shapes.weight=1.5"])
    assert kept_settings(resolve(heavy))["data.datasets"] == ["shapes (weight 1.5)", "shapes%50 (weight 1.5)"]


def test_patches_are_rounded_on_the_way_where_the_tower_would_round_them() -> None:
    settings = feed_settings(resolve(compose_config("tiny", overrides=["vision.dtype=bfloat16"])))
    assert settings.encoders["vision"].dtype == "bfloat16"


@pytest.mark.parametrize("overwrite", [False, True])
def test_the_line_to_resume_reads_the_stopped_runs_own_configuration(tmp_path: Path, overwrite: bool) -> None:
    run_dir = tmp_path / "a run"
    run_dir.mkdir()
    config = resolve(compose_config("tiny", overrides=[f"run_dir='{run_dir}'", f"overwrite={overwrite}", "seed=5"]))
    newest = Path(config.training.checkpoint_dir) / "step_3"
    assert "no checkpoint of this run yet" in resume_line(config, None)
    assert "no checkpoint of this run yet" in resume_line(config, tmp_path / "other" / "step_3")
    with pytest.raises(KeyboardInterrupt), Recorder(run_dir, 1, {}, to_yaml(config)) as recorder:
        recorder.record(StepMetrics(step=3, loss=2.0))
        raise KeyboardInterrupt
    words, called = shlex.split(resume_line(config, newest)), own_command("train")
    assert words[: len(called)] == called
    path, name, *overrides = words[len(called) :]
    again = resolve(compose_config(name.partition("=")[2], path.partition("=")[2], overrides))
    assert (again.seed, again.training.resume, again.run_dir) == (5, "auto", str(run_dir))
    check_run_dir(again)


def test_a_resumed_run_trains_what_its_checkpoint_trained() -> None:
    asked = ["training.trainable=[text,vision]", "training.frozen=['*bias','layers.0']"]
    kept = kept_settings(resolve(compose_config("tiny", overrides=asked)))
    assert kept["training.trainable"] == ["text", "vision"] and kept["training.frozen"] == ["*bias", "layers.0"]


def test_each_part_is_compiled_where_it_says() -> None:
    asked = ["vision.compile=true", "vision.zero_stage=0"]
    config, graph = resolve(compose_config("tiny", overrides=asked)), make_graph()
    assert [stage_settings(config, graph, s, "cpu", 1).part.compile for s in graph.stages] == [True, False]
