"""What is checked before a run, and layouts by itself."""

import json
import shutil
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForImageTextToText, AutoTokenizer
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2MLP

from dhp.cluster.placement import nodes as cluster_nodes
from dhp.cluster.placement.nodes import ClusterNode, DeviceCount, count_devices
from dhp.config.command_line import compose_config, to_yaml
from dhp.config.layout import DEGREES, GIVEN
from dhp.config.schema import Config
from dhp.core.batch import PositionRange
from dhp.core.errors import ConfigError, DataError, DhpError, ModelError
from dhp.core.parameters import AdapterSettings, is_adapter
from dhp.models.empty import adapt
from dhp.models.export import save_adapter
from dhp.models.registry import load_family
from dhp.plan.bench.machine import Machine
from dhp.plan.count.rates import Channel, Rates
from dhp.plan.model_checks import check_row_length
from dhp.plan.search import run_devices
from dhp.trainer import planned_layout
from dhp.trainer.curriculum import _checked_stages
from dhp.trainer.planned_layout import with_layout
from dhp.trainer.preflight import prepare
from dhp.trainer.settings import needed_paths
from tests.helpers.runs import tiny, train
from tests.helpers.tiny_videos import save_tiny, write_moving


def check(assets: Path, *overrides: str) -> Config:
    return prepare(compose_config("tiny", overrides=[f"tiny_assets={assets}", *overrides]))


def test_the_embedded_default_passes(tiny_assets: Path, tmp_path: Path) -> None:
    check(tiny_assets, f"run_dir={tmp_path / 'new'}")


@pytest.mark.parametrize("ends", [True, False])
def test_a_template_that_ends_no_answer_is_said(tiny_assets: Path, tmp_path: Path, ends: bool) -> None:
    template = (tiny_assets / "model" / "chat_template.jinja").read_text()
    (tmp_path / "own.jinja").write_text(template if ends else template.replace("<|im_end|>", ""))
    lines: list[str] = []
    own = [f"tiny_assets={tiny_assets}", f"data.chat_template={tmp_path / 'own.jinja'}", f"run_dir={tmp_path / 'new'}"]
    prepare(compose_config("tiny", overrides=own), say=lines.append)
    assert any("writes no token behind an answer" in line for line in lines) is not ends


@pytest.mark.parametrize(
    ("kind", "bounds", "told"),
    [
        ("Qwen2VLVideoProcessor", [], None),
        ("Qwen2VLVideoProcessor", ["data.max_pixels=4096"], "frame by frame (data.max_pixels=4096); the model's own"),
        ("OtherVideoProcessor", [], "28224"),
    ],
)
def test_other_sizes_of_frames_than_the_models_are_said(
    tiny_assets: Path, tmp_path: Path, kind: str, bounds: list[str], told: str | None
) -> None:
    model = shutil.copytree(tiny_assets / "model", tmp_path / "model")
    size = {"shortest_edge": 3136, "longest_edge": 50176}
    (model / "video_preprocessor_config.json").write_text(json.dumps({"video_processor_type": kind, "size": size}))
    lines: list[str] = []
    own = [f"{part}.model_name={model}" for part in ("vision", "text")] + [f"run_dir={tmp_path / 'new'}", *bounds]
    prepare(compose_config("tiny", overrides=[f"tiny_assets={tiny_assets}", *own]), say=lines.append)
    found = [line for line in lines if line.startswith("videos are scaled")]
    assert len(found) == (told is not None) and all(str(told) in line and "50176" in line for line in found)


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["vision.num_actors=3"], ["vision.ulysses=3 gives 4 query", "to 2 actors", "set vision.ulysses=2"]),
        (["text.num_actors=16"], ["text.tensor=16 leaves actors without any", "8 attention heads", "to 8 at most"]),
        (["vision.ulysses=3"], ["ulysses(3)", "num_actors(2)"]),
        (["training.batch_size=6"], ["batch_size(6)", "micro_batch_size(4)"]),
        (["vision.model_name=/nowhere/model", "text.model_name=/nowhere/model"], ["/nowhere/model"]),
        (["data.data_registry.shapes.annotation_path=/nowhere/a.json"], ["annotation_path=/nowhere/a.json"]),
        (["data.data_registry.shapes.data_path=/nowhere"], ["data_path=/nowhere"]),
        ([f"data.data_registry.shapes.annotation_path=/{'x' * 300}"], ["annotation_path=/xxx", "does not exist"]),
        (["data.datasets=['shapes%50']", "data.data_registry.shapes.data_path=/nowhere"], ["data_path=/nowhere"]),
        (["plugins=[my_familly]"], ["plugins=my_familly: there is no module my_familly here", "PYTHONPATH=FOLDER"]),
        (["data.datasets=[shape]"], ["shape is not in data.data_registry", "shapes"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) and "=" in value[0] else "",
)
def test_a_mistake_is_told_with_its_values(
    tiny_assets: Path, tmp_path: Path, overrides: list[str], told: list[str]
) -> None:
    with pytest.raises(DhpError) as caught:
        check(tiny_assets, f"run_dir={tmp_path / 'new'}", *overrides)
    for part in told:
        assert part in str(caught.value)
    assert not (tmp_path / "new").exists()


def test_two_mistakes_are_told_at_once(made_model: str, tiny_assets: Path, tmp_path: Path) -> None:
    """Degrees that ZeRO refuses, and more actors than heads; the second one came when the first was mended."""
    own = [f"vision.model_name={made_model}", f"text.model_name={made_model}", f"run_dir={tmp_path / 'new'}"]
    zero = ["text.parallelism=deepspeed", "text.zero_stage=2", "text.num_actors=9", "text.tensor=9"]
    with pytest.raises(ConfigError) as caught:
        check(tiny_assets, *own, *zero, "vision.num_actors=3")
    told = str(caught.value)
    assert told.startswith("3 things are wrong:")
    for mistake in ("text.tensor=9 makes FSDP2 the engine", "text.tensor=9 leaves", "vision.ulysses=3 gives"):
        assert told.count(mistake) == 1


def test_heads_that_are_shared_unevenly_are_told(nine_heads_model: str, tiny_assets: Path, tmp_path: Path) -> None:
    shutil.copy(tiny_assets / "model" / "preprocessor_config.json", nine_heads_model)
    model = [f"{part}.model_name={nine_heads_model}" for part in ("vision", "text")]
    lines: list[str] = []
    degrees = ["vision.num_actors=2", "text.num_actors=2", "text.tensor=2"]
    run = [f"tiny_assets={tiny_assets}", f"run_dir={tmp_path / 'new'}"]
    prepare(compose_config("tiny", overrides=[*run, *model, *degrees]), say=lines.append)
    told = [line.split(" does not")[0] for line in lines if "does not divide the heads" in line]
    assert told == ["vision.ulysses=2", "text.tensor=2"]


def test_rows_beyond_the_positions_of_the_model_are_refused() -> None:
    with pytest.raises(
        ConfigError, match="data.max_tokens=9000 is more than the 4096 positions .* Set data.max_tokens=40"
    ):
        check_row_length(9000, PositionRange(4096, of_pictures=True))
    check_row_length(4096, PositionRange(4096, of_pictures=True))
    check_row_length(9000, PositionRange(4096, of_pictures=False))  # tokens of a picture share some
    check_row_length(9000, None)
    check_row_length(None, PositionRange(4096, of_pictures=True))


def test_a_directory_that_holds_a_run_is_refused(tiny_assets: Path, tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text(json.dumps({}))
    (tmp_path / "config.yaml").write_text(to_yaml(compose_config("tiny")))
    with pytest.raises(ConfigError, match="overwrite"):
        check(tiny_assets, f"run_dir={tmp_path}")
    check(tiny_assets, f"run_dir={tmp_path}", "overwrite=true")


def mine(folder: Path, images: list[str], data_path: Path, *more: str) -> list[str]:
    """Overrides for a dataset of one sample an image."""
    turns = [{"from": "human", "value": "<image>What?"}, {"from": "gpt", "value": "A square."}]
    file = folder / "mine.jsonl"
    file.write_text("".join(json.dumps({"image": image, "conversations": turns}) + "\n" for image in images))
    registry = f"+data.data_registry.mine={{annotation_path: {file}, data_path: {data_path}}}"
    return [registry, "data.datasets=[shapes,mine]", f"run_dir={folder / 'new'}", *more]


def test_missing_images_are_found_before_anything_starts(tiny_assets: Path, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"x")
    overrides = mine(tmp_path, ["a.png"] * 99 + ["b.png"], tmp_path)
    with pytest.raises(DataError, match=r"dataset 'mine', line 100 of .*b\.png does not exist$"):
        check(tiny_assets, *overrides)
    check(tiny_assets, *overrides, "data.on_bad_sample=skip")
    check(tiny_assets, *overrides, "training.dry_run=true")
    prepare(compose_config("tiny", overrides=[f"tiny_assets={tiny_assets}", *overrides]), new_run=False)


def test_a_folder_that_is_named_twice_is_told(tiny_assets: Path, tmp_path: Path) -> None:
    (tmp_path / "set" / "images").mkdir(parents=True)
    (tmp_path / "set" / "images" / "a.png").write_bytes(b"x")
    meant = tmp_path / "set" / "images" / "a.png"
    for folder in ("images", "set/images"):
        told = f"/a.png does not exist, but {meant} does: .* path name {folder}; leave it out of data_path"
        with pytest.raises(DataError, match=told):
            check(tiny_assets, *mine(tmp_path, [f"{folder}/a.png"], meant.parent))


def test_large_annotations_are_left_for_later(
    tiny_assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dhp.data.sampling.probe._CHEAP_BYTES", 10)
    check(tiny_assets, *mine(tmp_path, ["b.png"], tmp_path))


def test_unknown_keys_name_the_nearest() -> None:
    with pytest.raises(ConfigError, match="training.batch_size"):
        compose_config("tiny", overrides=["training.batchsize=3"])


def test_a_plan_with_unknown_gradients_is_refused_before_any_actor(
    head_norms_model: str, tiny_assets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dhp.parallel.tensor import tensor_plan

    names = (f"vision.model_name={head_norms_model}", f"text.model_name={head_norms_model}", "training.dry_run=true")
    overrides = [*names, "vision.ulysses=1", "vision.num_actors=1", "vision.zero_stage=0", "text.tensor=2"]
    prepare(compose_config("tiny", overrides=overrides), new_run=False)
    monkeypatch.delitem(tensor_plan.OURS, "replicated_with_grad_allreduce")
    with pytest.raises(ModelError, match="style 'replicated_with_grad_allreduce' for model.language_model.layers.0"):
        prepare(compose_config("tiny", overrides=overrides), new_run=False)
    one = [*overrides[:-1], "text.tensor=1", "text.num_actors=1"]
    prepare(compose_config("tiny", overrides=one), new_run=False)


def test_autotp_of_a_decoder_without_a_plan_of_the_library_is_refused(
    tiny_assets: Path, qwen3_vl_model: str, tmp_path: Path
) -> None:
    own = [f"text.model_name={qwen3_vl_model}", f"vision.model_name={qwen3_vl_model}", f"run_dir={tmp_path / 'run'}"]
    autotp = ["text.parallelism=autotp", "text.num_actors=2", f"tiny_assets={tiny_assets}"]
    with pytest.raises(ConfigError, match="autotp with a qwen3_vl model: .* Set text.parallelism=tensor"):
        prepare(compose_config("tiny", overrides=[*own, *autotp]))


def test_a_step_that_has_no_whole_groups_of_micro_batches_cannot_be_interleaved(
    tiny_assets: Path, four_layers_model: str, tmp_path: Path
) -> None:
    own = [f"{part}.model_name={four_layers_model}" for part in ("vision", "text")]
    cut = ["text.parallelism=pipeline", "text.num_actors=2", "text.virtual_stages=2", "training.schedule=interleaved"]
    few = ["training.batch_size=3", "training.micro_batch_size=1", f"run_dir={tmp_path / 'run'}"]
    with pytest.raises(ConfigError, match=r"micro-batches\(3\) % pipeline\(2\) = 1 != 0"):
        prepare(compose_config("tiny", overrides=[*own, *cut, *few, f"tiny_assets={tiny_assets}"]))


@pytest.mark.slow
def test_a_tied_weight_may_be_cut_by_any_engine(tiny_assets: Path, tied_model: str, tmp_path: Path) -> None:
    own = [f"{part}.model_name={tied_model}" for part in ("vision", "text")]
    cut = ["text.pipeline=2", "text.parallelism=data", "text.num_actors=4", "text.zero_stage=1"]
    cut.append("training.dry_run=true")  # this model has no image processor
    overrides = [*own, *cut, f"run_dir={tmp_path / 'run'}", f"tiny_assets={tiny_assets}"]
    assert prepare(compose_config("tiny", overrides=overrides)).text.zero_engine == "deepspeed"


def test_a_package_that_ranks_here_would_miss_is_told_before_they_start(
    tiny_assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ["text.attention_backend=flash_attention_2", "text.dtype=bfloat16", "text.zero_stage=0"]
    overrides = [*asked, f"tiny_assets={tiny_assets}", f"run_dir={tmp_path / 'run'}"]
    from dhp.parallel import device

    monkeypatch.setattr(device, "_installed", lambda package, module: None)
    with pytest.raises(ConfigError, match="flash-attn is not installed. Set text.attention_backend=auto"):
        prepare(compose_config("tiny", overrides=overrides))
    prepare(compose_config("tiny", overrides=[*overrides, "cluster.address=auto"]))  # whose nodes look for themselves
    monkeypatch.setattr(device, "_installed", lambda package, module: "2.8.3")
    prepare(compose_config("tiny", overrides=overrides))


def test_dropout_that_could_not_be_drawn_by_token_is_refused(
    tiny_assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [f"run_dir={tmp_path / 'new'}", "text.lora.rank=2", "text.lora.dropout=0.1"]
    check(tiny_assets, *asked)
    monkeypatch.setattr(Qwen2MLP, "forward", lambda self, states: self.down_proj(torch.cat([self.up_proj(states)] * 2)))
    with pytest.raises(ConfigError, match=r"text\.lora\.dropout=0\.1 of .*down_proj: it is given 24 rows"):
        check(tiny_assets, *asked)


def test_adapters_to_begin_with_are_compared_unless_a_checkpoint_has_others(tiny_assets: Path, tmp_path: Path) -> None:
    model = str(tiny_assets / "model")
    own = {"text": AdapterSettings(2, 4.0)}
    beside = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32)
    adapt(beside, load_family(model), own, "cpu")
    save_adapter(model, {n: p.detach() for n, p in beside.named_parameters() if is_adapter(n)}, own, tmp_path / "a")
    asked = [f"run_dir={tmp_path / 'run'}", f"text.lora.begin_from={tmp_path / 'a'}"]
    config = check(tiny_assets, *asked, "text.lora.rank=2")
    assert needed_paths(config, None)["text"]["text.lora.begin_from"] == str(tmp_path / "a")
    assert "text.lora.begin_from" not in needed_paths(config, tmp_path)["text"] | needed_paths(config, None)["vision"]
    with pytest.raises(ConfigError, match="text.lora.rank=3, and the adapter of .* has 2"):
        check(tiny_assets, *asked, "text.lora.rank=3")
    check(tiny_assets, *asked, "text.lora.rank=3", f"training.resume={tmp_path / 'other'}")
    with pytest.raises(ConfigError, match="text.lora has settings, but text.lora.rank=0"):
        check(tiny_assets, *asked)


def test_four_bits_without_their_package_are_told_before_ranks_start(
    tiny_assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ["text.lora.rank=2", "text.lora.quantization=nf4", "text.tensor=1", "text.num_actors=1"]
    asked += ["text.parallelism=none", "cluster.device=cuda", f"tiny_assets={tiny_assets}"]
    overrides = [*asked, f"run_dir={tmp_path / 'run'}"]
    from dhp.models import quantized

    monkeypatch.setattr(quantized, "find_spec", lambda module: None)
    with pytest.raises(ConfigError, match="text.lora.quantization=nf4: bitsandbytes, .* is not installed"):
        prepare(compose_config("tiny", overrides=overrides))
    prepare(compose_config("tiny", overrides=[*overrides, "cluster.address=auto"]))  # whose nodes look for themselves
    prepare(compose_config("tiny", overrides=[*overrides, "training.dry_run=true"]))


def test_a_logger_that_is_not_installed_is_refused_with_the_command(
    tiny_assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ["training.loggers=[swanlab]", f"tiny_assets={tiny_assets}", f"run_dir={tmp_path / 'run'}"]
    from dhp.parallel import device

    monkeypatch.setattr(device, "_installed", lambda package, module: None)
    with pytest.raises(ConfigError, match="swanlab is not installed here.* `pip install swanlab`"):
        prepare(compose_config("tiny", overrides=[*asked, "cluster.address=auto"]))
    prepare(compose_config("tiny", overrides=asked), new_run=False)
    prepare(compose_config("tiny", overrides=[*asked, "training.dry_run=true"]))


def test_a_variable_of_another_trainer_and_keys_that_are_not_read_are_named(
    tiny_assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MAX_PIXELS", "1003520")
    rows = [{"query": "What?", "response": "A.", "topic": "a"}, {"query": "", "response": "A."}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = [f"data.data_registry.mine.annotation_path={tmp_path / 'rows.jsonl'}", "data.datasets=[mine]"]
    own += [f"tiny_assets={tiny_assets}", f"run_dir={tmp_path / 'run'}", "data.eval_datasets=[]"]
    said: list[str] = []
    prepare(compose_config("tiny", overrides=[*own, "data.on_bad_sample=skip"]), say=said.append)
    assert said[1].startswith("MAX_PIXELS is set in the environment and has no effect; here it is data.max_pixels")
    assert said[-1] == "mine: keys that are not read, of 2 samples: topic (1)"
    with pytest.raises(DataError, match="the question is empty"):
        prepare(compose_config("tiny", overrides=own))


def test_what_takes_time_is_told_when_it_begins(tiny_assets: Path, tmp_path: Path) -> None:
    said: list[str] = []
    prepare(compose_config("tiny", overrides=[f"tiny_assets={tiny_assets}", f"run_dir={tmp_path}"]), say=said.append)
    model = f"checking the model {tiny_assets}/model"
    assert said == ["checking the configuration", model, "looking at some samples of shapes"]


def test_a_folder_in_rays_cache_and_nothing_to_go_on_with_are_said(
    tiny_assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    lines: list[str] = []
    cached = f"run_dir={tmp_path / 'runtime_resources' / 'new'}"
    own = [f"tiny_assets={tiny_assets}", cached, "training.resume=auto"]
    prepare(compose_config("tiny", overrides=own), say=lines.append)
    assert any(line.startswith(f"warning: {cached} lies in Ray's cache") for line in lines)
    assert any("has no checkpoint, so the run begins at step 1" in line for line in lines)
    lines.clear()
    prepare(compose_config("tiny", overrides=[own[0], f"run_dir={tmp_path / 'new'}"]), say=lines.append)
    assert not any("Ray's cache" in line or "begins at step 1" in line for line in lines)


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused_before_ray_starts(
    tiny_assets: Path, tmp_path: Path
) -> None:
    model = shutil.copytree(tiny_assets / "model", tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens([f"<more {number}>" for number in range(20)])
    tokenizer.save_pretrained(model)
    with pytest.raises(ModelError, match="the tokenizer gives ids up to"):
        check(
            tiny_assets, *(f"{part}.model_name={model}" for part in ("vision", "text")), f"run_dir={tmp_path / 'new'}"
        )


@pytest.mark.skipif(find_spec("torchvision") is not None, reason="the library's processor can be made here")
def test_pictures_that_torchvision_alone_reads_are_refused_before_ray_starts(tiny_assets: Path, tmp_path: Path) -> None:
    model = shutil.copytree(tiny_assets / "model", tmp_path / "model")
    (model / "preprocessor_config.json").write_text('{"image_processor_type": "Lfm2VlImageProcessor"}')
    with pytest.raises(ModelError, match=r"model_type 'qwen2_5_vl' are read by torchvision alone.* Install the one"):
        check(
            tiny_assets, *(f"{part}.model_name={model}" for part in ("vision", "text")), f"run_dir={tmp_path / 'new'}"
        )


def test_videos_of_a_model_that_says_nothing_of_frames_are_refused_before_ray_starts(tmp_path: Path) -> None:
    model = save_tiny("internvl", tmp_path / "model")
    write_moving(tmp_path / "clip.mp4", 8, 4)
    row = {"query": "<video>What?", "response": "A square.", "videos": ["clip.mp4"]}
    (tmp_path / "rows.json").write_text(json.dumps([row] * 8))
    given = [f"{part}.model_name={model}" for part in ("vision", "text")]
    given += [f"data.data_registry.made.annotation_path={tmp_path / 'rows.json'}", "data.datasets=[made]"]
    given += [f"data.data_registry.made.data_path={tmp_path}", "data.eval_datasets=[]", f"run_dir={tmp_path / 'new'}"]
    prepare(compose_config("tiny", overrides=[*given, "tiny_assets=null"]))
    (model / "video_preprocessor_config.json").unlink()
    with pytest.raises(DataError, match=r"rows.json.*a video, but .*/model has no video_preprocessor_config.json"):
        prepare(compose_config("tiny", overrides=[*given, "tiny_assets=null"]))


LINK = Channel(1e9, 1e-5)
RATES = Rates(1e12, 5e11, 1e10, 1e-5, LINK, Channel(1e8, 1e-4), 2)


def machine(count: int, memory: float = 2.0**30) -> Machine:
    return Machine("made", count, 2, {"float32": RATES}, memory, LINK, contexts=False)


def planned(
    monkeypatch: pytest.MonkeyPatch, assets: Path, *overrides: str, devices: Machine | None = None
) -> tuple[Config, list[str]]:
    """The configuration with its layout, as the command line would give it, and what is said of it."""
    monkeypatch.setattr(planned_layout, "machine_ahead", lambda *_: (devices or machine(2), "made up"))
    monkeypatch.setattr(planned_layout, "job_overrides", lambda: list(overrides))
    said: list[str] = []
    config = compose_config("tiny", overrides=[f"tiny_assets={assets}", *overrides])
    return with_layout(config, said.append), said


def test_a_given_layout_is_not_planned(tiny_assets: Path) -> None:
    config = compose_config("tiny", overrides=[f"tiny_assets={tiny_assets}"])
    assert with_layout(config) is config


@pytest.mark.slow
def test_what_files_set_stays_with_auto(monkeypatch: pytest.MonkeyPatch, tiny_assets: Path, tmp_path: Path) -> None:
    overrides = ["layout=auto", "text.tensor=2", "text.ulysses=1", f"run_dir={tmp_path / 'run'}"]
    config, said = planned(monkeypatch, tiny_assets, *overrides, devices=machine(4))
    assert config.layout == GIVEN
    assert config.vision.zero_stage == 1  # of the file
    assert (config.text.tensor, config.text.ulysses) == (2, 1)
    run = prepare(config)
    assert run.text.num_actors * (1 if run.cluster.collocate else 2) == 4
    assert any("text.tensor=2" in line and "s a step" in line for line in said)


def test_what_the_command_line_sets_stays_with_free(
    monkeypatch: pytest.MonkeyPatch, tiny_assets: Path, tmp_path: Path
) -> None:
    alone = f"run_dir={tmp_path / 'run'}"
    config, _ = planned(monkeypatch, tiny_assets, "layout=free", "training.micro_batch_size=2", alone)
    assert config.training.micro_batch_size == 2
    kept, _ = planned(monkeypatch, tiny_assets, "layout=free", "vision.zero_stage=1", alone)
    assert kept.vision.zero_stage == 1
    for one in (config, kept):
        run = prepare(one)
        assert run.text.num_actors == 2
        assert all(isinstance(getattr(run.text, key), int) for key in DEGREES)


def test_where_no_layout_takes_all_devices_fewer_are_taken(monkeypatch: pytest.MonkeyPatch, tiny_assets: Path) -> None:
    """Heads of 4 and 8, batches of 8: nothing divides by 7, and with 7 devices apart neither part can have its own."""
    overrides = ["layout=free", "cluster.collocate=true", "vision.tensor=1", "vision.ulysses=1", "text.ring=1"]
    stays = ["text.pipeline=1", "vision.pipeline=1", "text.ulysses=1", "vision.ring=1", "training.batch_size=8"]
    config, said = planned(monkeypatch, tiny_assets, *overrides, *stays, devices=machine(5))
    assert config.text.num_actors == 4
    assert any("on 4 of them, as 5 can have none" in line for line in said)


def test_nothing_that_fits_is_an_error_with_the_smallest(monkeypatch: pytest.MonkeyPatch, tiny_assets: Path) -> None:
    with pytest.raises(ConfigError, match=r"no layout fits on 2 × made .* the smallest takes 0\.0\d GiB .* dhp plan"):
        planned(monkeypatch, tiny_assets, "layout=free", devices=machine(2, 2.0**21))


def record(folder: Path, config: Config) -> None:
    """What a run with this configuration leaves, as far as a resume looks for its layout."""
    checkpoint = folder / "checkpoints" / "step_3"
    checkpoint.mkdir(parents=True)
    (checkpoint / "checkpoint.json").write_text(json.dumps({"step": 3}))
    (folder / "config.yaml").write_text(to_yaml(config))


def test_a_resumed_run_keeps_its_layout(monkeypatch: pytest.MonkeyPatch, tiny_assets: Path, tmp_path: Path) -> None:
    own = [f"tiny_assets={tiny_assets}", "text.ulysses=2", "text.tensor=1", "text.parallelism=sequence"]
    before = compose_config("tiny", overrides=[*own, "training.micro_batch_size=1", "vision.recompute=full"])
    record(tmp_path / "run", prepare(before, new_run=False))
    resumed = ["layout=free", f"run_dir={tmp_path / 'run'}", "training.resume=auto"]
    config, said = planned(monkeypatch, tiny_assets, *resumed)
    assert said == [f"layout=free: that of the run that is resumed, by {tmp_path / 'run' / 'config.yaml'}"]
    assert (config.text.ulysses, config.text.tensor, config.vision.ulysses) == (2, 1, 2)
    assert (config.training.micro_batch_size, config.vision.recompute) == (1, "full")
    prepare(config, new_run=False)
    elsewhere = ["layout=free", f"training.resume={tmp_path / 'run'}", f"run_dir={tmp_path / 'next'}"]
    assert planned(monkeypatch, tiny_assets, *elsewhere)[0].text.ulysses == 2
    other, said = planned(monkeypatch, tiny_assets, *resumed, "text.tensor=2")  # its checkpoint is read in any layout
    assert said[0].endswith("planned anew, as text.tensor=2 is set, and the run that is resumed has text.tensor=1")
    assert (other.text.tensor, other.training.micro_batch_size) == (2, 1)
    prepare(other, new_run=False)
    fewer, said = planned(monkeypatch, tiny_assets, *resumed, "cluster.devices=1", devices=machine(1))
    assert "planned anew, as cluster.devices=1 is set, and the run that is resumed has cluster.devices=None" in said[0]
    assert (fewer.text.num_actors, fewer.vision.num_actors, fewer.training.micro_batch_size) == (1, 1, 1)
    fresh = planned(monkeypatch, tiny_assets, "layout=free", f"run_dir={tmp_path / 'new'}", "training.resume=auto")
    assert any("planning for" in line for line in fresh[1])  # there is nothing to continue


def test_stages_that_are_replaced_are_planned_anew(
    monkeypatch: pytest.MonkeyPatch, tiny_assets: Path, tmp_path: Path
) -> None:
    """What lies there goes before the first stage trains, with its layout; without overwrite it is kept."""
    monkeypatch.setattr(planned_layout, "machine_ahead", lambda *_: (machine(2), "made up"))
    monkeypatch.setattr(planned_layout, "job_overrides", list)
    own = [f"tiny_assets={tiny_assets}", "layout=free", f"run_dir={tmp_path}", "+stages.one={}"]
    config = compose_config("tiny", overrides=own)
    before = compose_config("tiny", overrides=[f"tiny_assets={tiny_assets}", "vision.tensor=2", "vision.ulysses=1"])
    before.vision.parallelism, before.vision.zero_stage = "tensor", 0
    record(tmp_path / "1_one", prepare(before, new_run=False))
    (tmp_path / "1_one" / "metrics.jsonl").touch()
    said: list[str] = []
    (kept,) = _checked_stages(config, said.append)
    assert kept.prepared.vision.tensor == 2 and "one: layout=free: that of the run that is resumed" in said[0]
    (anew,) = _checked_stages(replace(config, overwrite=True), said.append)
    assert anew.prepared.vision.tensor == 1 and "planning for" in " ".join(said)
    assert anew.stage.config.training.resume == kept.stage.config.training.resume == "auto"


def test_a_record_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, tiny_assets: Path, tmp_path: Path) -> None:
    record(tmp_path, compose_config("tiny", overrides=[f"tiny_assets={tiny_assets}"]))
    (tmp_path / "config.yaml").write_text("text: {tensor: '${oc.env:HOME}'}")
    with pytest.raises(ConfigError, match="not the plain record"):
        planned(monkeypatch, tiny_assets, "layout=free", f"run_dir={tmp_path}", "training.resume=auto")


def node(name: str, **resources: float) -> ClusterNode:
    return ClusterNode(name, name, name, {key.replace("_of_", ":"): own for key, own in resources.items()}, {})


@pytest.mark.parametrize(
    ("nodes", "device", "found"),
    [
        ([node("a", CPU=8), node("b", CPU=4)], "auto", DeviceCount(None, 12, 4)),
        ([node("a", CPU=8, GPU=8, accelerator_type_of_H100=1), node("b", CPU=4)], "auto", DeviceCount("H100", 8, 8)),
        ([node("a", CPU=8, GPU=8, accelerator_type_of_H100=1)], "cpu", DeviceCount(None, 8, 8)),
    ],
)
def test_the_devices_of_a_cluster_are_those_of_its_nodes(
    monkeypatch: pytest.MonkeyPatch, nodes: list[ClusterNode], device: str, found: DeviceCount
) -> None:
    monkeypatch.setattr(cluster_nodes, "ray_session", lambda *_, **__: nullcontext())
    monkeypatch.setattr(cluster_nodes, "read_nodes", lambda: nodes)
    assert count_devices("auto", device, 1.0) == found


def test_gpus_of_two_kinds_are_not_planned_for(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [node("a", GPU=8, accelerator_type_of_H100=1), node("b", GPU=8, accelerator_type_of_A100=1)]
    monkeypatch.setattr(cluster_nodes, "ray_session", lambda *_, **__: nullcontext())
    monkeypatch.setattr(cluster_nodes, "read_nodes", lambda: nodes)
    with pytest.raises(ConfigError, match="a H100, b A100"):
        count_devices("auto", "auto", 1.0)


def test_rays_names_of_gpus_are_those_of_the_table() -> None:
    assert [run_devices._name(kind) for kind in ("H100", "A100-80G", "Other")] == ["h100", "a100", "Other"]


def layout_of(file: Path) -> Mapping[str, object]:
    values = yaml.safe_load(file.read_text())
    degrees = {f"{name}.{key}": values[name][key] for name in ("vision", "text") for key in DEGREES}
    return {"layout": values["layout"], **degrees}


@pytest.mark.slow
def test_a_run_plans_and_goes_on_in_its_layout(tiny_assets: Path, tmp_path: Path) -> None:
    arguments = tiny(tiny_assets, tmp_path / "run", "layout=free", "cluster.devices=2", "training.save_steps=1")
    first = train(*arguments, "training.max_steps=1")
    assert first.status == 0 and first.left == (), first.stderr
    assert "layout=free: planning for 2 × cpu" in first.stdout
    chosen = layout_of(tmp_path / "run" / "config.yaml")
    assert chosen["layout"] == GIVEN
    again = train(*arguments, "training.max_steps=2", "training.resume=auto", "overwrite=false")
    assert again.status == 0, again.stderr
    assert "layout=free: that of the run that is resumed" in again.stdout
    assert layout_of(tmp_path / "run" / "config.yaml") == chosen
