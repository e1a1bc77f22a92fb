"""Weights are read, from files and hubs, without code."""

import ast
import io
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import (
    CONFIG_MAPPING,
    AutoModelForImageTextToText,
    LlavaConfig,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    core_model_loading,
)

from dhp.checkpoint.resume import Start
from dhp.config.command_line import compose_config
from dhp.config.resolve import resolve
from dhp.core.errors import ModelError
from dhp.core.parameters import TrainingRules
from dhp.doctor.diagnose import examine
from dhp.models import registry
from dhp.models.empty import start_limit_s, weight_bytes
from dhp.models.load import load_part
from dhp.models.pretrained import auxiliary_files, check_weight_files, load_image_processor
from dhp.models.registry import FAMILIES, load_family
from dhp.models.types import Chunk
from dhp.plan.run_plan import RunPlan
from dhp.trainer import session as session_module
from dhp.trainer.session import Session
from tests.helpers.graphs import make_graph
from tests.helpers.ranks import run_on_ranks
from tests.helpers.tiny import save_model


def test_each_part_holds_its_own_weights_and_no_other(made_model: str) -> None:
    family = load_family(made_model)
    whole = dict(AutoModelForImageTextToText.from_pretrained(made_model).named_parameters())
    vision = dict(load_part(made_model, family.decoder.modules, torch.float32).named_parameters())
    text = dict(load_part(made_model, family.tower.modules, torch.float32).named_parameters())
    assert vision.keys() == {name for name in whole if name.startswith("model.visual.")}
    assert text.keys() == whole.keys() - vision.keys()
    for name, weight in (vision | text).items():
        assert torch.equal(weight, whole[name]), name


def test_parts_train_and_the_original_class_is_untouched(made_model: str) -> None:
    family = load_family(made_model)
    part = load_part(made_model, family.decoder.modules, torch.float32)
    assert part.training
    assert type(part) is not type(AutoModelForImageTextToText.from_pretrained(made_model))
    assert AutoModelForImageTextToText.from_pretrained(made_model).lm_head.weight is not None


def _sharded_names(model: str) -> dict[str, tuple[int, ...]]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))
    part = load_part(model, load_family(model).tower.modules, torch.float32, mesh)
    whole = dict(AutoModelForImageTextToText.from_pretrained(model).named_parameters())
    for name, weight in part.named_parameters():
        full = weight.full_tensor() if isinstance(weight, DTensor) else weight
        assert torch.equal(full, whole[name]), name
    return {n: tuple(p.to_local().shape) for n, p in part.named_parameters() if isinstance(p, DTensor)}


def test_tensor_ranks_read_their_own_slices(made_model: str) -> None:
    first, second = run_on_ranks(_sharded_names, 2, made_model)
    assert first == second
    assert first["lm_head.weight"] == (256, 64)  # of 512 × 64
    assert first["model.language_model.embed_tokens.weight"] == (256, 64)
    layer = "model.language_model.layers.0."
    assert first[layer + "self_attn.k_proj.weight"] == (16, 64)  # 2 of 4 heads of 8
    assert first[layer + "mlp.down_proj.weight"] == (64, 48)
    assert layer + "input_layernorm.weight" not in first


def _tied_gradient_error(model: str) -> float:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))
    part = load_part(model, load_family(model).tower.modules, torch.float64, mesh)
    whole = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float64)
    ids = torch.arange(3, 20)[None]
    for one in (part, whole):
        logits = one(input_ids=ids, use_cache=False).logits
        torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="sum").backward()
    wanted = whole.get_input_embeddings().weight.grad
    return float((part.get_input_embeddings().weight.grad.full_tensor() - wanted).norm() / wanted.norm())


def test_tied_embeddings_get_both_gradients(tmp_path: Path) -> None:
    tied = str(save_model(tmp_path / "tied", tied=True))
    assert max(run_on_ranks(_tied_gradient_error, 2, tied)) < 1e-12


def test_the_files_have_the_key_layout_of_the_hub(made_model: str) -> None:
    keys = load_file(Path(made_model) / "model.safetensors").keys()
    assert "visual.patch_embed.proj.weight" in keys
    assert "model.layers.0.self_attn.q_proj.weight" in keys


SECOND = Chunk(range(1, 2), first=False, last=True)


def _load_second_layer(folder: Path) -> PreTrainedModel:
    family = load_family(str(folder))
    return load_part(str(folder), (*family.tower.modules, *family.decoder.absent([SECOND])), torch.float32)


def _rewrite(model: str, folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Path:
    shutil.copytree(model, folder)
    save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors", {"format": "pt"})
    return folder


def test_a_slice_needs_no_weight_of_other_layers(made_model: str, tmp_path: Path) -> None:
    others = ("model.layers.0.", "model.embed_tokens.", "visual.")
    keep = lambda weights: {name: weight for name, weight in weights.items() if not name.startswith(others)}
    part = _load_second_layer(_rewrite(made_model, tmp_path / "half", keep))
    assert "model.language_model.layers.1.mlp.up_proj.weight" in dict(part.named_parameters())


def test_a_slice_refuses_a_missing_weight_of_its_own(made_model: str, tmp_path: Path) -> None:
    keep = lambda weights: {name: weight for name, weight in weights.items() if "layers.1.mlp.up" not in name}
    with pytest.raises(ModelError, match="missing keys: model.language_model.layers.1.mlp.up_proj.weight. "):
        _load_second_layer(_rewrite(made_model, tmp_path / "broken", keep))


def test_a_slice_refuses_an_unknown_weight_among_its_own(made_model: str, tmp_path: Path) -> None:
    add = lambda weights: weights | {f"model.layers.{n}.odd.weight": torch.ones(2) for n in (0, 1)}
    with pytest.raises(ModelError, match=r"unexpected keys: model.language_model.layers.1.odd.weight. "):
        _load_second_layer(_rewrite(made_model, tmp_path / "odd", add))


def test_a_slice_reads_only_what_it_holds(made_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    own = core_model_loading._materialize_copy
    monkeypatch.setattr(
        core_model_loading, "_materialize_copy", lambda given, *more: read.append(given) or own(given, *more)
    )
    part = _load_second_layer(Path(made_model))
    assert len(read) == len(list(part.named_parameters()))


@pytest.mark.parametrize(("drop", "part"), [("visual.merger", "vision"), ("model.norm", "text")])
def test_a_missing_weight_is_refused_by_name(made_model: str, tmp_path: Path, drop: str, part: str) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(made_model, folder)
    weights = load_file(folder / "model.safetensors")
    kept = {k: w for k, w in weights.items() if not k.startswith(drop)}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    family = load_family(str(folder))
    dropped = family.decoder.modules if part == "vision" else family.tower.modules
    with pytest.raises(ModelError, match="missing keys: .*" + drop.rpartition(".")[2]):
        load_part(str(folder), dropped, torch.float32)


def test_weights_of_another_shape_are_refused(made_model: str, tmp_path: Path) -> None:
    folder = tmp_path / "other"
    shutil.copytree(made_model, folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = torch.ones(3)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match="mismatched keys: .*norm.weight"):
        load_part(str(folder), load_family(str(folder)).tower.modules, torch.float32)


@pytest.mark.parametrize(
    ("model_type", "told"),
    [
        ("bert", "'bert' is no vision-language model .* nearest by name is"),
        (
            "mllama",
            "'mllama': MllamaForConditionalGeneration.forward takes no mm_encoder_outputs.* nearest by name is lla",
        ),
    ],
)
def test_a_family_without_the_contract_is_refused_with_the_nearest_that_has_it(
    tmp_path: Path, model_type: str, told: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(ModelError, match=told):
        load_family(str(tmp_path))


@pytest.mark.parametrize(
    "changes, told",
    [({"text_config": {"attention_dropout": 0.1}}, "attention_dropout=0.1 of Qwen2_5_VLTextConfig is not supported")],
)
def test_attention_that_sees_less_is_refused(tmp_path: Path, changes: dict, told: str) -> None:
    config = Qwen2_5_VLConfig(**changes)
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=told):
        load_family(str(tmp_path))


PHI = {"model_type": "phi3", "resid_pdrop": 0.1, "pad_token_id": 0}
MIXTRAL = {"model_type": "mixtral", "router_jitter_noise": 0.1}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"text_config": PHI}, r"resid_pdrop=0\.1 of Phi3Config: its layers would draw random numbers .* Set it to 0"),
        ({"text_config": MIXTRAL}, r"router_jitter_noise=0\.1 of MixtralConfig: its layers would draw"),
        ({"vision_config": {"model_type": "clip_vision_model", "drop_path_rate": 0.2}}, r"drop_path_rate=0\.2 of CLIP"),
    ],
)
def test_layers_that_draw_random_numbers_are_refused(tmp_path: Path, changes: dict, told: str) -> None:
    """Of a family with an adapter of its own, whose layers nobody runs before."""
    LlavaConfig(**changes).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=told):
        load_family(str(tmp_path))


@pytest.mark.parametrize(
    "changes",
    [
        {"text_config": {**PHI, "resid_pdrop": 0.0}},
        {"text_config": {**MIXTRAL, "router_jitter_noise": 0.0}},
        {"text_config": {"model_type": "llama", "classifier_dropout": 0.1, "drop_tokens": True}},  # of no layer
    ],
)
def test_layers_that_draw_none_are_not_refused(tmp_path: Path, changes: dict) -> None:
    LlavaConfig(**changes).save_pretrained(tmp_path)
    assert load_family(str(tmp_path)).decoder is not None


@pytest.mark.parametrize("quantized", [{"quant_method": "fp8"}, {"quant_method": "awq", "bits": 4}])
@pytest.mark.parametrize("inside", [False, True])
def test_quantized_weights_are_refused_by_their_method(tmp_path: Path, quantized: dict, inside: bool) -> None:
    config = LlavaConfig().to_dict()
    (config["text_config"] if inside else config)["quantization_config"] = quantized
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=f"weights are quantized .{quantized['quant_method']}.* model.dequantize"):
        load_family(str(tmp_path))


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_no_family_is_refused_as_its_library_has_it(model_type: str) -> None:
    config = CONFIG_MAPPING[model_type]()
    registry._refuse_dropout(config)
    registry._refuse_chance(config)


def test_a_directory_without_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no usable model configuration: "):
        load_family(str(tmp_path))
    with pytest.raises(ModelError, match=r"no usable model configuration \(there is no such directory, so the hub was"):
        load_family(str(tmp_path / "nowhere"))


def write(file: Path, nbytes: int) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("wb") as opened:
        opened.truncate(nbytes)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory with two files of weights, sparse, and others."""
    folder = tmp_path / "model"
    write(folder / "model-00001-of-00002.safetensors", 5_000_000_000)
    write(folder / "model-00002-of-00002.safetensors", 2_000_000_000)
    write(folder / "original" / "other.safetensors", 10)
    write(folder / "model.safetensors.index.json", 10)
    write(folder / "pytorch_model.bin", 10)
    return folder


def test_a_directory_weighs_what_its_safetensors_do(model: Path) -> None:
    assert weight_bytes(str(model)) == 7_000_000_000


def test_a_run_that_continues_reads_its_checkpoint_too(model: Path, tmp_path: Path) -> None:
    for part in ("vision", "text", "text/optimizer"):
        write(tmp_path / "step_3" / part / "rank_00000.safetensors", 1_000_000_000)
    assert weight_bytes(str(model), tmp_path / "step_3") == 10_000_000_000


def test_a_hub_id_weighs_what_its_shipped_shape_does() -> None:
    assert weight_bytes("Qwen/Qwen2.5-VL-3B-Instruct") == 2 * 3_754_622_976
    assert weight_bytes("nobody/has-this") == 0


def test_the_limit_is_the_base_and_the_time_that_a_slow_disk_takes() -> None:
    assert start_limit_s(300.0, 0) == 300.0
    assert start_limit_s(300.0, 145_000_000_000) == 1750.0


def test_a_run_waits_for_its_parts_by_the_size_of_its_model(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = resolve(compose_config("tiny", overrides=[f"run_dir={tmp_path / 'run'}"]))
    config.text.model_name = str(model)
    config.cluster.start_timeout_s, config.cluster.step_timeout_s = 40.0, 50.0
    graph = make_graph()
    plan = RunPlan(config, SimpleNamespace(source=str(model), rules=TrainingRules()), graph)
    session = Session(plan, tmp_path, Start())
    cluster = session._cluster
    assert (cluster._layout.start_timeout_s, cluster._layout.build_timeout_s) == (40.0, 110.0)
    cluster.device = "cpu"
    assert cluster._common("gloo", 1)["timeout_s"] == 110.0
    cluster.groups = dict.fromkeys(("vision", "text"), SimpleNamespace(start=lambda *_: None, take_watched=list))
    waited: list[float] = []

    def waits(_: list[Any], limit_s: float) -> None:
        waited.append(limit_s)
        raise InterruptedError

    monkeypatch.setattr(session_module, "wait_all", waits)
    with pytest.raises(InterruptedError):
        session.start_stages(1)
    assert waited == [110.0]


class Harmful:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (open, ("made by a pickle", "w"))  # type: ignore[return-value]


@pytest.mark.parametrize(
    "content, reason",
    [
        ({"weight_map": {"a": "../outside.safetensors"}}, "names '../outside.safetensors', which is outside"),
        ({"weight_map": {"a": "/etc/hostname"}}, "which is outside"),
        ({"weight_map": {"a": 3}}, "names 3, which is outside"),
        ({"weight_map": {"a": "gone.safetensors"}}, "names gone.safetensors, which is not there"),
        ({"weight_map": ["a"]}, "is no index of weights"),
        ({}, "is no index of weights"),
        ({"weight_map": {"a": "there.safetensors"}}, None),
    ],
)
def test_an_index_names_files_of_its_folder(tmp_path: Path, content: object, reason: str | None) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for file in (tmp_path / "outside.safetensors", folder / "there.safetensors"):
        file.write_bytes(b"")
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))
    if reason is None:
        check_weight_files(folder)
        return
    with pytest.raises(ModelError, match=f"model.safetensors.index.json .*{reason}"):
        check_weight_files(folder)


@pytest.mark.parametrize("content", [b"", b"x" * 300, pickle.dumps(Harmful(), 2), pickle.dumps({"a": Harmful()}, 2)])
def test_a_strangers_pickle_is_refused_and_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(ModelError, match="pytorch_model.bin is no file of weights alone"):
        check_weight_files(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["pytorch_model.bin"]
    (tmp_path / "model.safetensors").write_bytes(b"")  # which is read in its place
    check_weight_files(tmp_path)


@pytest.mark.parametrize("zipped", [True, False])
def test_weights_as_torch_saves_them_pass(tmp_path: Path, zipped: bool) -> None:
    weights = {"a": torch.ones(2)}
    torch.save(weights, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    check_weight_files(tmp_path)


ROOT = Path(__file__).parents[2]


def auto_calls(tree: ast.AST) -> list[tuple[int, bool]]:
    """Line of each call of `Auto….from_pretrained` or `.from_config`, and whether it refuses remote code."""
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner = node.func.value
        name = owner.id if isinstance(owner, ast.Name) else owner.attr if isinstance(owner, ast.Attribute) else ""
        if name.startswith("Auto") and node.func.attr == "from_pretrained":
            given = {word.arg: word.value for word in node.keywords}
            value = given.get("trust_remote_code")
            found.append((node.lineno, isinstance(value, ast.Constant) and value.value is False))
    return found


def test_the_search_sees_calls() -> None:
    text = ["AutoConfig.from_pretrained(a)", "t.AutoModel.from_pretrained(a, trust_remote_code=False)", "x.load(a)"]
    assert auto_calls(ast.parse("\n".join(text))) == [(1, False), (2, True)]


def test_every_auto_class_is_denied_remote_code() -> None:
    """Left unset, transformers asks on standard input whether to run it."""
    calls = {
        f"{file.relative_to(ROOT)}:{line}": denied
        for folder in ("dhp", "experiments", "scripts")
        for file in sorted((ROOT / folder).rglob("*.py"))
        for line, denied in auto_calls(ast.parse(file.read_text()))
    }
    assert len(calls) >= 15
    assert [where for where, denied in calls.items() if not denied] == []


@pytest.fixture
def evil(tiny_assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model that brings code for its configuration and its pictures, and a person who says yes to everything."""
    folder = tmp_path / "evil"
    shutil.copytree(tiny_assets / "model", folder)
    pwned = f"open({str(tmp_path / 'PWNED')!r}, 'w').close()\n"
    code = f"{pwned}from transformers import PretrainedConfig, BaseImageProcessor\n"
    code += "class Evil(PretrainedConfig):\n    model_type = 'evil'\nclass EvilImages(BaseImageProcessor):\n    pass\n"
    (folder / "evil.py").write_text(code)
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 100))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    return folder


def change(file: Path, **values: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_an_unknown_models_own_code_is_not_run(evil: Path, tmp_path: Path) -> None:
    change(evil / "config.json", model_type="evil", auto_map={"AutoConfig": "evil.Evil"})
    for load in (load_family, examine):
        with pytest.raises(
            ModelError, match="no model_type 'evil', and code that comes with a model is not run.*plugins="
        ):
            load(str(evil))
    assert not (tmp_path / "PWNED").exists()


def test_an_unknown_image_processors_own_code_is_not_run(evil: Path, tmp_path: Path) -> None:
    own = {"image_processor_type": "EvilImages", "auto_map": {"AutoImageProcessor": "evil.EvilImages"}}
    change(evil / "preprocessor_config.json", **own)
    with pytest.raises(ModelError):
        load_image_processor(str(evil))
    assert not (tmp_path / "PWNED").exists()


def test_weights_and_hidden_files_stay_behind(tmp_path: Path) -> None:
    for name in ("config.json", "a.safetensors", "a.safetensors.index.json", "code.py", ".env", ".gitattributes"):
        (tmp_path / name).touch()
    (tmp_path / "linked.json").symlink_to("config.json")
    assert [file.name for file in auxiliary_files(str(tmp_path))] == ["code.py", "config.json", "linked.json"]


@pytest.mark.parametrize("name", ["NOTICE.txt", ".hidden"])
def test_a_link_out_of_the_directory_publishes_nothing(name: str, tmp_path: Path) -> None:
    (tmp_path / "id_rsa").write_text("PRIVATE KEY MATERIAL")
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").touch()
    (model / name).symlink_to(tmp_path / "id_rsa")
    with pytest.raises(ModelError, match=rf"{name} leads to .*id_rsa, and would be copied"):
        auxiliary_files(str(model))
    (model / name).unlink()
    beside = tmp_path / "model2"  # whose name begins alike
    beside.mkdir()
    (beside / "a").touch()
    (model / name).symlink_to(beside / "a")
    with pytest.raises(ModelError, match="would be copied"):
        auxiliary_files(str(model))


def test_the_hubs_cache_links_its_files(tmp_path: Path) -> None:
    repository = tmp_path / "models--a--b"
    snapshot, blobs = repository / "snapshots" / "0123", repository / "blobs"
    for folder in (snapshot, blobs):
        folder.mkdir(parents=True)
    (blobs / "ffff").touch()
    os.symlink("../../blobs/ffff", snapshot / "config.json")
    assert [file.name for file in auxiliary_files(str(snapshot))] == ["config.json"]
    other = tmp_path / "models--c--d" / "blobs"
    other.mkdir(parents=True)
    (other / "eeee").touch()
    os.symlink("../../../models--c--d/blobs/eeee", snapshot / "other.json")
    with pytest.raises(ModelError, match=r"other\.json leads to"):
        auxiliary_files(str(snapshot))
