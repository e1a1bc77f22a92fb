"""From a configuration to devices, parts and ranks."""

import ast
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dhp.batch.encoder_shards import Split
from dhp.batch.row_shards import Draws
from dhp.batch.shard import Division
from dhp.checkpoint.resume import Start
from dhp.cluster.transport.shared_memory import RemoteValue
from dhp.config.command_line import compose_config, to_yaml, with_words
from dhp.config.layout import resolve_part
from dhp.config.resolve import resolve, training_stages
from dhp.config.run_dir import check_run_dir
from dhp.config.schema import Config, PartConfig
from dhp.core.axes import Degrees
from dhp.core.batch import Batch
from dhp.core.dispatch import spread
from dhp.core.errors import ConfigError
from dhp.core.graph import Edge, Node, RankDevice, Route, StageGraph, dense
from dhp.core.parameters import AdapterSettings, Selector, TrainingRules
from dhp.core.reports import DeviceInfo, KernelUse
from dhp.core.text import shell_command
from dhp.data.sampling.sampler import BalanceSettings, BatchLayout
from dhp.engine.stage import StageEngine
from dhp.models.family import Family
from dhp.models.flops import NO_BACKWARD, MatmulShare, TrainedShare
from dhp.models.registry import load_family
from dhp.models.types import LayerParts, Part
from dhp.observe.metrics import StepMetrics
from dhp.observe.recorder import Recorder
from dhp.plan.batches import feed_settings, passes_of
from dhp.plan.count.counted_model import Counted, count_model
from dhp.plan.run_plan import devices_as_planned, find_localities, plan_run, world
from dhp.plan.run_plan import make_graph as stage_graph_of
from dhp.plan.trainable import training_rules
from dhp.step.schedule import draw, make_schedule
from dhp.step.stages import make_stages
from dhp.step.step import train_step
from dhp.supervise.attempt import ElasticLayout, ElasticLayouts
from dhp.trainer import session as module
from dhp.trainer.planned_layout import _fewer, find_layouts
from dhp.trainer.preflight import prepare
from dhp.trainer.session import Session, look_ahead, named_elsewhere
from dhp.trainer.settings import fixed_settings, free_layout, measures, needed_paths, resume_line, stage_settings
from dhp.trainer.step_reports import compile_notes, find_peak, name_kernels, overlap_warning
from tests.helpers.graphs import make_graph
from tests.helpers.graphs import make_graph as make_graph_of_graphs
from tests.step.test_evaluate import Call, FakeGroup

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
        "vision": {"norm": "auto", "rotary": "plain", "gate": "auto", "mlp": "auto"},
        "text": {"norm": "written", "rotary": "auto", "gate": "plain", "mlp": "auto"},
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
        "division": Division(
            {"vision": Split(2, 6, "float32", None)},  # near whom is known once the ranks have their devices
            text=Degrees(data=3, tensor=2),
            passes={"vision": NO_BACKWARD},
            draws=Draws(11),
        ),
        "seed": 11,
        "balancing": BalanceSettings(),
        "features": None,  # which a run alone looks for
        "exchange": "",
        "objective": "sft",
        "plugins": ("mine",),
        "reference": "",  # which a run of preferences finds
    }


def test_parts_whose_adapters_drop_reach_the_dataset_actor() -> None:
    own = ["text.lora.rank=2", "text.lora.dropout=0.1", "vision.lora.rank=2"]
    assert feed_settings(resolve(compose_config("tiny", overrides=own))).division.draws.parts == ("text",)


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
    plain = fixed_settings(resolve(compose_config("tiny", overrides=OVERRIDES)))
    assert plain["data.datasets"] == ["shapes", "shapes%50"]
    heavy = compose_config("tiny", overrides=[*OVERRIDES, "data.data_registry.shapes.weight=1.5"])
    assert fixed_settings(resolve(heavy))["data.datasets"] == ["shapes (weight 1.5)", "shapes%50 (weight 1.5)"]


def test_patches_are_rounded_on_the_way_where_the_tower_would_round_them() -> None:
    settings = feed_settings(resolve(compose_config("tiny", overrides=["vision.dtype=bfloat16"])))
    assert settings.division.encoders["vision"].dtype == "bfloat16"


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
    words, called = shlex.split(resume_line(config, newest)), shell_command("train")
    assert words[: len(called)] == called
    path, name, *overrides = words[len(called) :]
    again = resolve(compose_config(name.partition("=")[2], path.partition("=")[2], overrides))
    assert (again.seed, again.training.resume, again.run_dir) == (5, "auto", str(run_dir))
    check_run_dir(again)


def test_a_resumed_run_trains_what_its_checkpoint_trained() -> None:
    asked = ["training.trainable=[text,vision]", "training.frozen=['*bias','layers.0']"]
    kept = fixed_settings(resolve(compose_config("tiny", overrides=asked)))
    assert kept["training.trainable"] == ["text", "vision"] and kept["training.frozen"] == ["*bias", "layers.0"]


def test_each_part_is_compiled_where_it_says() -> None:
    asked = ["vision.compile=true", "vision.zero_stage=0"]
    config, graph = resolve(compose_config("tiny", overrides=asked)), make_graph()
    assert [stage_settings(config, graph, s, "cpu", 1).part.compile for s in graph.stages] == [True, False]


class Group:
    """Ranks on the given devices; measured: which of them were asked to measure."""

    def __init__(self, *devices: DeviceInfo):
        self.devices, self.size = devices, len(devices)
        self.measured: list[int] = []

    def execute_all(self, method: str, *arguments: Any, timeout_s: float) -> list[DeviceInfo]:
        assert method == "describe_device" and timeout_s == 9.0
        wanted = [measure for (measure,) in spread(arguments, self.size)]
        self.measured += [rank for rank, measure in enumerate(wanted) if measure]
        return [
            DeviceInfo(d.kind, d.name, d.device_id, d.format, 1e9 if measure else None)
            for d, measure in zip(self.devices, wanted, strict=True)
        ]


def test_collocated_parts_on_two_machines_measure_each_once() -> None:
    on = lambda device_id: DeviceInfo("cpu", "cpu", device_id, "float32")
    groups = {"vision": Group(on("m"), on("m")), "text": Group(on("m"), on("n"), on("n"))}
    said: list[str] = []
    assert find_peak(groups, 9.0, said.append)[0] == 2e9
    assert (groups["vision"].measured, groups["text"].measured) == ([0], [1])
    assert said == ["timing how fast the CPUs multiply, for mfu"]


def test_gpus_are_looked_up_and_an_unknown_one_is_told_once() -> None:
    known = DeviceInfo("cuda", "NVIDIA H100 PCIe", "GPU 0", "bfloat16")
    unknown = DeviceInfo("cuda", "Some GPU", "GPU 1", "bfloat16")
    said: list[str] = []
    assert find_peak({"vision": Group(known), "text": Group(known)}, 9.0, said.append)[0] == 756e12 and not said
    groups = {"vision": Group(known), "text": Group(unknown, unknown)}
    assert find_peak(groups, 9.0, said.append)[0] is None
    assert said == [
        "mfu is not reported: no peak of Some GPU in bfloat16 is known. Add it to configs/devices/devices.json, from "
        "the vendor's data sheet"
    ]
    assert not groups["text"].measured


def test_kernels_of_a_stage_are_one_result_of_its_verb() -> None:
    """A rank's tuple is as many results of a call, which has one."""
    uses = (KernelUse("attention", "varlen", 2), KernelUse("loss", "chunked"))
    found = StageEngine.describe_kernels(SimpleNamespace(_kernels=uses))  # type: ignore[arg-type]
    assert not isinstance(found, tuple) and list(found) == list(uses)


def test_each_stage_names_its_kernels_and_what_would_be_faster() -> None:
    uses = (KernelUse("attention", "varlen", 2), KernelUse("gate", "plain", 2, "gate compiled, which needs triton"))
    group = SimpleNamespace(execute_all=lambda verb, timeout_s: {"describe_kernels": [list(uses), []]}[verb])
    loss = SimpleNamespace(execute_all=lambda *_, timeout_s: [[KernelUse("loss", "chunked")]])
    assert name_kernels({"vision": group, "text": loss}, 9.0) == [
        "kernels of vision: attention varlen ×2, gate plain ×2",
        "faster in vision: gate compiled, which needs triton",
        "kernels of text: loss chunked",
    ]


@pytest.mark.parametrize(
    ("schedule", "device", "tensor", "warns"),
    [
        ("vision_ahead", "cuda", 2, True),
        ("sequential", "cuda", 2, False),
        ("vision_ahead", "cpu", 2, False),
        ("vision_ahead", "cuda", 1, False),
    ],
)
def test_overlapping_collectives_on_shared_gpus_are_warned_of(
    schedule: str, device: str, tensor: int, warns: bool
) -> None:
    graph = make_graph(Degrees(ulysses=tensor), Degrees(tensor=tensor))
    config: Any = SimpleNamespace(training=SimpleNamespace(schedule=schedule))
    warning = overlap_warning(config, graph, device)
    assert (warning is not None) == warns and (not warns or "training.schedule=vision_ahead" in warning)


def test_adapters_that_are_not_compiled_are_named() -> None:
    asked = ["text.compile=true", "text.lora.rank=2", "text.lora.dropout=0.1"]
    config = compose_config("tiny", overrides=[*asked, "vision.lora.rank=2", "vision.lora.dropout=0.2"])
    assert compile_notes(config) == [
        "text.compile=true does not compile matrices with adapters where text.lora.dropout=0.1: what is dropped is "
        "drawn by code that is not compiled. Set text.lora.dropout=0 to compile them"
    ]
    for left in range(3):
        assert not compile_notes(compose_config("tiny", overrides=asked[:left] + asked[left + 1 :]))


def test_replicas_that_share_devices_are_nearest() -> None:
    graph = make_graph(Degrees(data=4), Degrees(data=2, tensor=2))
    (locality,) = find_localities(graph, devices_as_planned(graph), 0.01).values()
    assert locality.distances == ((0, 0, 1, 1), (1, 1, 0, 0)) and locality.slack == 0.01


def test_nodes_come_next() -> None:
    graph = make_graph(Degrees(data=4), Degrees(data=2, tensor=2))
    own = [RankDevice(device, device // 2) for device in range(4)]
    assert find_localities(graph, {"vision": own, "text": own}, 0.0)["vision"].distances == ((0, 0, 2, 2), (2, 2, 0, 0))


def test_the_first_stage_of_a_pipeline_counts() -> None:
    graph = make_graph(Degrees(data=4), Degrees(data=2), stages=2)
    assert find_localities(graph, devices_as_planned(graph), 0.0)["vision"].distances == ((0, 1, 1, 1), (1, 0, 1, 1))


def test_one_vision_replica_has_no_choice() -> None:
    graph = make_graph(Degrees(ulysses=4), Degrees(data=2))
    assert find_localities(graph, devices_as_planned(graph), 0.01) == {}


ONE = "vision.num_actors=1 vision.parallelism=none vision.zero_stage=0 text.num_actors=1 text.parallelism=none"


@pytest.fixture
def compose(tiny_assets: Path, tmp_path: Path):  # type: ignore[no-untyped-def]
    """A run of the embedded default with these layouts."""

    def made(elastic: Sequence[str], *overrides: str) -> tuple[Config, Config]:
        own = [f"tiny_assets={tiny_assets}", f"run_dir={tmp_path / 'run'}", "training.max_restarts=1"]
        config = compose_config("tiny", overrides=[*own, *overrides])
        config.training.elastic = list(elastic)
        return config, prepare(config)

    return made


def test_named_layouts_are_ordered_by_devices(compose) -> None:  # type: ignore[no-untyped-def]
    said: list[str] = []
    three = "text.num_actors=3 text.parallelism=data training.empty_rows=true"
    config, prepared = compose([ONE, three], "text.num_actors=4")
    assert find_layouts(config, prepared, said.append) == ElasticLayouts(
        ElasticLayout(4), (ElasticLayout(3, tuple(three.split())), ElasticLayout(1, tuple(ONE.split())))
    )
    assert said[1] == f"training.elastic: with 1 of 4 devices, {ONE}"


def test_planned_layouts_are_layouts_of_the_same_run(compose) -> None:  # type: ignore[no-untyped-def]
    config, prepared = compose(["auto"])
    layouts = find_layouts(config, prepared)
    (one,) = layouts.smaller
    assert (layouts.own.devices, one.devices) == (2, 1)
    assert "layout=given" in one.words and "text.num_actors=1" in one.words
    assert f"training.micro_batch_size={prepared.training.micro_batch_size}" in one.words or not any(
        word.startswith("training.micro_batch_size") for word in one.words
    )
    again = prepare(with_words(config, one.words), new_run=False)
    assert again.training.batch_size == prepared.training.batch_size


def test_a_planned_layout_is_named_whole_as_are_those_beside_it(compose) -> None:  # type: ignore[no-untyped-def]
    """With layout=auto a word alone would be lost: a resumed run has the layout of its record."""
    config, prepared = compose([ONE], "text.num_actors=2", "text.tensor=2")
    layouts = find_layouts(config, prepared, planned=True)
    own, one = layouts.own.words, layouts.smaller[0].words
    assert own[0] == one[0] == "layout=given" and "text.tensor=2" in own and "text.num_actors=2" in own
    assert prepare(with_words(config, own), new_run=False).text == prepared.text
    assert not any(word.startswith("text.tensor=2") for word in one) and one[-5:] == tuple(ONE.split())
    assert len({word.partition("=")[0] for word in one}) == len(one)


@pytest.mark.parametrize(
    ("elastic", "said"),
    [
        (["text.num_actors=2"], r"training.elastic\[0\]=text.num_actors=2: it takes 2 devices, and the run itself 2"),
        ([f"{ONE} training.batch_size=4"], "neither data nor training: training.batch_size would be 4, not 8"),
        ([f"{ONE} training.learning_rate=1"], "training.learning_rate would be 1.0, not 0.0015"),
        ([ONE, "text.num_actor=1"], r"training.elastic\[1\].*did you mean text.num_actors"),
        (["text.num_actors"], "text.num_actors is no setting; write key=value"),
        (["text.num_actors=one"], "text.num_actors"),
        (["text.num_actors=3 vision.num_actors=1"], r"training.elastic\[0\]"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(compose, elastic: list[str], said: str) -> None:  # type: ignore[no-untyped-def]
    config, prepared = compose(elastic)
    with pytest.raises(ConfigError, match=said):
        find_layouts(config, prepared)


def test_it_needs_restarts_and_one_layout(compose, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match="training.max_restarts > 0"):
        compose([ONE], "training.max_restarts=0")
    config, _ = compose([ONE])
    with pytest.raises(ConfigError, match="each stage has a layout of its own"):
        training_stages(config, tmp_path)


def test_numbers_of_devices_that_are_planned() -> None:
    assert _fewer(4) == [3, 2, 1] and _fewer(1) == []
    assert _fewer(64) == [56, 48, 40, 32, 24, 16, 8]


ROOT = Path(__file__).parents[2]


@dataclass
class WithRadar(Config):
    """A configuration with one part more."""

    radar: PartConfig = field(default_factory=PartConfig)


class Radar(Part):
    """An encoder of two layers. What it makes enters the decoder at its start and behind its second layer."""

    modules = ("model.radar_tower",)
    tensors = ("radar_embeddings", "radar_features")
    layers = LayerParts("model.radar_tower.layers", (), (), ("radar",) * 2)

    def check(self, asked: PartConfig) -> None:
        """Any degrees will do."""


def with_radar(model: str) -> tuple[WithRadar, Family]:
    """Vision on 2 ranks, radar on 3, text in two stages of two layers each; nothing of radar is trained."""
    names = [f"{part}.model_name={model}" for part in ("vision", "text")]
    plain = resolve(compose_config("tiny", overrides=[*names, "text.parallelism=pipeline", "text.num_actors=2"]))
    asked = PartConfig(model, "data", 3, dtype="bfloat16", recompute="auto")
    config = WithRadar(**{f.name: getattr(plain, f.name) for f in fields(plain)}, radar=resolve_radar(asked))
    family = load_family(model)
    config.training.frozen = ["radar"]
    decoder = family.decoder

    class Senses(type(decoder)):
        @property
        def takes(self) -> dict[str, int]:
            return {**super().takes, "radar_embeddings": 0, "radar_features": 2}

    decoder.__class__ = Senses
    return config, replace(family, others={"radar": Radar()})


def resolve_radar(asked: PartConfig) -> PartConfig:
    """By the rules of an encoder that there is."""
    return resolve_part("vision", asked)


@pytest.fixture(scope="module")
def heard(four_layers_model: str) -> tuple[WithRadar, StageGraph]:
    config, family = with_radar(four_layers_model)
    counted = Counted(family, four_layers_model, training_rules(config.training, family), {}, "sft")
    return config, stage_graph_of(config, counted)


def test_its_stage_and_edges_are_in_the_chain(heard: tuple[WithRadar, StageGraph]) -> None:
    _, graph = heard
    assert [(s.name, s.degrees.world, s.trains) for s in graph.stages] == [
        ("vision", 2, True), ("radar", 3, False), ("text.0", 1, True), ("text.1", 1, True),
    ]  # fmt: skip
    first, second = Node("text.0"), Node("text.1")
    assert set(graph.edges) == {
        Edge(Node("vision"), first, ("embeddings",), True),
        Edge(Node("radar"), first, ("radar_embeddings",), False),
        Edge(Node("radar"), second, ("radar_features",), False),
        Edge(first, second, ("hidden_states",), True),
    }
    assert not graph.goes_back(Node("radar"))


def test_its_settings_come_from_its_own_section(heard: tuple[WithRadar, StageGraph]) -> None:
    config, graph = heard
    assert list(world(config)) == ["vision", "radar", "text"]
    assert world(config)["radar"]["data"] == 3
    assert free_layout(config)["radar.dtype"] == "bfloat16"
    assert set(needed_paths(config, None)) == {"vision", "radar", "text", "data"}
    assert measures(config)
    assert not measures(replace(config, radar=replace(config.radar, recompute="none")))
    own = stage_settings(config, graph, graph.stage("radar"), "cpu", 10)
    assert (own.part.dtype, own.recompute) == ("bfloat16", ("none", "none"))
    encoders = feed_settings(config, find_localities(graph, devices_as_planned(graph), 0.01)).division.encoders
    assert (encoders["radar"].replicas, encoders["radar"].dtype) == (3, "bfloat16")
    assert encoders["radar"].locality.distances == ((0, 1, 1),)  # the first of them is on the first text stage's device
    assert set(encoders) == {"vision", "radar"}


def test_a_step_sends_its_rows_to_both_text_stages(heard: tuple[WithRadar, StageGraph]) -> None:
    _, graph = heard
    schedule = make_schedule("1f1b", graph, 2)
    assert draw(schedule, graph).splitlines() == [
        "vision 0 1 . .  .  0' .  1'",
        "radar  0 1 . .  .  .  .  .",
        "text.0 . 0 1 .  0' .  1' .",
        "text.1 . . 0 0' 1  1' .  .",
    ]
    calls: list[Call] = []
    stages = make_stages(graph, {s.name: FakeGroup(s.name, s.degrees.world, calls) for s in graph.stages})
    ranks = {"vision": 2, "radar": 3, "text": 1}
    work = {part: [[f"{part}{m}:{shard}" for shard in range(n)] for m in (0, 1)] for part, n in ranks.items()}
    routes = {"vision": [dense(2, 1)] * 2, "radar": [Route(((1, 0),))] * 2}
    train_step(stages, schedule, graph.ties, Batch("info", work, routes))
    given = [(c.stage, c.arguments[2:]) for c in calls if c.method == "forward_step" and c.arguments[0] == 1]
    assert given == [
        *(("vision", (f"vision1:{rank}",)) for rank in (0, 1)),
        *(("radar", (f"radar1:{rank}",)) for rank in (0, 1, 2)),
        ("text.0", ("text1:0", "e10:vision0#0", "e10:vision1#0", "e10:radar1#0")),
        ("text.1", ("text1:0", "e10:radar1#1", "e10:text.00#0")),
    ]
    assert {c.stage for c in calls if c.method == "backward_step"} == {"vision", "text.0", "text.1"}
    assert {c.stage for c in calls if c.method == "optimizer_step"} == {s.name for s in graph.stages}


@pytest.mark.parametrize("room", ["run", "step", "cluster", "planner"])
def test_no_file_names_a_part(room: str) -> None:
    """A literal "vision", or an attribute .vision of a configuration or .tower of a family, would leave others out."""
    named = {"vision", "text", "audio", "tower", "decoder"}
    for path in sorted((ROOT / "dhp" / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            word = getattr(node, "value", None) if isinstance(node, ast.Constant) else getattr(node, "attr", None)
            assert not (isinstance(word, str) and word in named), f"{path}:{node.lineno} names {word}"


WORK = {"vision": [["v00", "v01"], ["v10", "v11"]], "text": [["t0"], ["t1"]]}


def test_each_rank_of_an_encoder_fetches_its_shard_of_all_micro_batches() -> None:
    graph = make_graph_of_graphs(Degrees(data=2, tensor=2), Degrees(tensor=4))
    asked: dict[str, Any] = {}
    groups: Any = {
        name: SimpleNamespace(look_ahead=lambda refs, name=name: asked.update({name: refs}))
        for name in ("vision", "text")
    }
    fetched = look_ahead(groups, graph, WORK)
    assert asked == {"vision": [["v00", "v10"], ["v00", "v10"], ["v01", "v11"], ["v01", "v11"]]}
    assert fetched == {"v00", "v01", "v10", "v11"}
    assert look_ahead(groups, graph, {}) == frozenset()  # behind the last step
    assert named_elsewhere(WORK, fetched - {"v11"}) == {
        "vision": [[RemoteValue("v00"), RemoteValue("v01")], [RemoteValue("v10"), "v11"]],
        "text": WORK["text"],
    }


def test_what_reads_for_evaluation_draws_nothing() -> None:
    """Adapters drop in training alone: without draws, towers that take pictures whole take several at a time."""
    config = resolve(compose_config("tiny", overrides=["text.lora.rank=2", "text.lora.dropout=0.1"]))
    opened: list[Any] = []
    actor = SimpleNamespace(take_watched=list)
    session = Session.__new__(Session)
    session.graph = make_graph_of_graphs(Degrees(data=2), Degrees(data=2))
    session._cluster = SimpleNamespace(
        devices=devices_as_planned(session.graph),
        dataset_actor=lambda make, settings, **more: opened.append(settings) or actor,
    )
    assert feed_settings(config).division.draws.parts == ("text",)
    assert session.open_reader(config, "others") is actor
    assert [(one.division.draws.parts, one.exchange) for one in opened] == [((), "others")]


def test_steps_wait_for_a_checkpoint_only_where_it_is_not_written_beside_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(module, "weight_bytes", lambda *_: 0)
    for background, saving_s in (("true", 0.0), ("false", 900.0)):
        overrides = [f"training.save_in_background={background}", "training.save_timeout_s=900"]
        config = resolve(compose_config("tiny", overrides=overrides))
        assert module._layout(config, make_graph_of_graphs(), tmp_path, Start()).saving_s == saving_s
