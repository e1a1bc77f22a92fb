"""A model's files: changed, exported, composed."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    CLIPConfig,
    CLIPImageProcessorPil,
    CLIPModel,
    Dinov2Config,
    Dinov2Model,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SiglipImageProcessorPil,
    SiglipVisionConfig,
    SiglipVisionModel,
)

from dhp.__main__ import main
from dhp.core.errors import ModelError
from dhp.core.torch_private import persistent_buffers
from dhp.doctor.diagnose import examine
from dhp.models import config_file
from dhp.models import export as export_module
from dhp.models.compose import add_image_token, compose, written_with_images
from dhp.models.config_file import change_positions, flat_rope, read_config, write_config
from dhp.models.export import save_whole
from dhp.models.load import model_class
from dhp.tiny.tiny_model import make_family, make_tokenizer
from tests.helpers.rows import slow
from tests.helpers.transformers_4 import install, logits


def tied(folder: Path) -> dict[str, Tensor]:
    """A model whose configuration ties its head, with a head of its own: its weights by name."""
    make_family("llava", folder)
    weights = {name: p.detach() for name, p in model_class(str(folder)).from_pretrained(folder).named_parameters()}
    config = json.loads((folder / "config.json").read_text())
    config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"] = True
    (folder / "config.json").write_text(json.dumps(config))
    assert not torch.equal(weights["lm_head.weight"], weights["model.language_model.embed_tokens.weight"])
    return weights


def test_a_head_that_is_not_the_embedding_is_written_though_the_configuration_ties_them(tmp_path: Path) -> None:
    weights = tied(tmp_path / "model")
    save_whole(tmp_path / "model", weights, tmp_path / "out")
    read = dict(model_class(str(tmp_path / "out")).from_pretrained(tmp_path / "out").named_parameters())
    assert read.keys() == weights.keys() and all(torch.equal(read[name], one) for name, one in weights.items())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False


def test_a_head_that_is_the_embedding_stays_tied(tmp_path: Path) -> None:
    weights = tied(tmp_path / "model")
    weights["lm_head.weight"] = weights["model.language_model.embed_tokens.weight"].clone()
    save_whole(tmp_path / "model", weights, tmp_path / "out")
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as tensors:
        assert len(tensors.keys()) == len(weights) - 1
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is True


def without_norms(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in state.items() if "norm" not in name}


def with_zeros(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor * 0 if "q_proj" in name else tensor for name, tensor in state.items()}


@pytest.mark.parametrize(
    "change, reason",
    [(without_norms, r"\d+ of \d+ numbers were written, none are"), (with_zeros, r"\[\(\d+, \d+\).* other bytes")],
)
def test_what_is_written_otherwise_is_an_error(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[dict[str, Tensor]], dict[str, Tensor]],
    reason: str,
) -> None:
    weights = tied(tmp_path / "model")
    monkeypatch.setattr(export_module, "in_file_form", lambda model, state: change(state))
    with pytest.raises(ModelError, match=f"would be another model .*{reason}"):
        save_whole(tmp_path / "model", weights, tmp_path / "out")


SIDE, PATCH = 56, 14
TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
SEEN = {"image_size": SIDE, "patch_size": PATCH}
ONE_SIZE = {"height": SIDE, "width": SIDE}
CORPUS = ["What is it? A red square."] * 3
Kind = tuple[Callable[..., Any], Callable[..., Any], dict[str, Any]]
DECODERS: dict[str, Kind] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 8}),
    "mistral": (MistralConfig, MistralForCausalLM, {"dtype": torch.bfloat16}),
    "gemma2": (Gemma2Config, Gemma2ForCausalLM, {"head_dim": 8}),
    "granite": (GraniteConfig, GraniteForCausalLM, {"logits_scaling": 4.0}),
}


def save_tower(name: str, folder: Path) -> str:
    """A tower with random weights and its image processor; of CLIP, both halves, as checkpoints have it."""
    torch.manual_seed(1)
    if name == "clip":
        config = CLIPConfig(vision_config=TOWER | SEEN, text_config=TOWER, projection_dim=16)
        CLIPModel(config).save_pretrained(folder)
        CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size=ONE_SIZE).save_pretrained(folder)
    elif name == "siglip":
        SiglipVisionModel(SiglipVisionConfig(**TOWER, **SEEN)).save_pretrained(folder)
        SiglipImageProcessorPil(size=ONE_SIZE).save_pretrained(folder)
    else:
        Dinov2Model(Dinov2Config(**TOWER, **SEEN)).save_pretrained(folder)
        CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size=ONE_SIZE).save_pretrained(folder)
    return str(folder)


def save_decoder(name: str, folder: Path, rows: int | None = None) -> str:
    """A decoder with random weights and a tokenizer. rows: of its embedding; None: one for each token."""
    kind, model, more = DECODERS[name]
    tokenizer = make_tokenizer(CORPUS, 300)
    sizes = TOWER | {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4}
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    torch.manual_seed(2)
    made = model(kind(vocab_size=rows or len(tokenizer), **{**sizes, **ends, **more}))
    made.to(more.get("dtype", torch.float32)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("tower", "decoder", "tokens"),
    [("clip", "llama", 16), ("siglip", "qwen2", 16), slow("dino", "mistral", 16), slow("clip", "qwen3", 16)],
)
def test_both_halves_keep_their_weights_and_it_can_be_trained(
    tower: str, decoder: str, tokens: int, tmp_path: Path
) -> None:
    vision, text = save_tower(tower, tmp_path / "tower"), save_decoder(decoder, tmp_path / "decoder")
    made = compose(vision, text, tmp_path / "made", seed=5)
    assert (made.image_tokens, made.side, made.image_token) == (tokens, SIDE, "<|image_pad|>")
    model, info = AutoModelForImageTextToText.from_pretrained(made.folder, dtype="auto", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    causal = AutoModelForCausalLM.from_pretrained(text, dtype="auto")
    assert model.dtype == causal.dtype
    ids = torch.arange(8)[None]
    assert torch.allclose(model(input_ids=ids).logits, causal(input_ids=ids).logits, rtol=1e-5, atol=1e-6)
    other = type(model.model.vision_tower).from_pretrained(vision, dtype=model.dtype).eval()
    wanted = other.state_dict()
    assert all(torch.equal(p, wanted[name]) for name, p in model.model.vision_tower.state_dict().items())
    found = examine(str(made.folder))
    assert found.family == "llava" and found.trainable, found.as_table()


def test_the_seed_decides_the_projector_alone(tmp_path: Path) -> None:
    vision, text = save_tower("clip", tmp_path / "tower"), save_decoder("llama", tmp_path / "decoder")
    state = torch.random.get_rng_state()
    made = [compose(vision, text, tmp_path / f"made{n}", seed=seed).folder for n, seed in enumerate((1, 1, 2))]
    assert torch.equal(state, torch.random.get_rng_state())
    first, again, other = (AutoModelForImageTextToText.from_pretrained(folder).state_dict() for folder in made)
    assert all(torch.equal(first[name], again[name]) for name in first)
    apart = {name for name in first if not torch.equal(first[name], other[name])}
    assert apart and all("multi_modal_projector" in name for name in apart)


def test_a_projector_that_was_trained_is_taken(tmp_path: Path) -> None:
    vision, text = save_tower("clip", tmp_path / "tower"), save_decoder("llama", tmp_path / "decoder")
    first = compose(vision, text, tmp_path / "first", seed=1).folder
    held = AutoModelForImageTextToText.from_pretrained(first).model.multi_modal_projector.state_dict()
    file = tmp_path / "projector.safetensors"
    save_file({name: one.contiguous() for name, one in held.items()}, file)
    made = compose(vision, text, tmp_path / "made", seed=2, projector=file)
    found = AutoModelForImageTextToText.from_pretrained(made.folder).model.multi_modal_projector.state_dict()
    assert found.keys() == held.keys() and all(torch.equal(found[name], one) for name, one in held.items())


def test_a_projector_of_another_model_is_refused(tmp_path: Path) -> None:
    vision, text = save_tower("clip", tmp_path / "tower"), save_decoder("llama", tmp_path / "decoder")
    file = tmp_path / "projector.safetensors"
    save_file({"linear_1.weight": torch.zeros(2, 3)}, file)
    told = r"has linear_1.weight \[2, 3\], and this tower and decoder need linear_1.bias \[\d+\], linear_1.weight"
    with pytest.raises(ModelError, match=told):
        compose(vision, text, tmp_path / "made", projector=file)
    file.write_bytes(b"no weights")
    with pytest.raises(ModelError, match="no safetensors file that can be read"):
        compose(vision, text, tmp_path / "made", projector=file)
    assert not (tmp_path / "made").exists()


def test_a_tokenizer_without_a_token_for_images_gets_one_with_the_mean_of_all_rows(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(CORPUS, 300)
    plain = json.loads(tokenizer.backend_tokenizer.to_str())
    kept = [one for one in plain["added_tokens"] if "pad|" not in one["content"]]
    plain["added_tokens"], rows = kept, max(one["id"] for one in kept) + 1
    vision, text = save_tower("siglip", tmp_path / "tower"), save_decoder("llama", tmp_path / "decoder", rows)
    (tmp_path / "decoder" / "tokenizer.json").write_text(json.dumps(plain))
    settings = json.loads((tmp_path / "decoder" / "tokenizer_config.json").read_text())
    settings = {key: value for key, value in settings.items() if "special_tokens" not in key and "added" not in key}
    (tmp_path / "decoder" / "tokenizer_config.json").write_text(json.dumps(settings))
    made = compose(vision, text, tmp_path / "made")
    assert made.image_token == "<image>"
    model = AutoModelForImageTextToText.from_pretrained(made.folder)
    before = AutoModelForCausalLM.from_pretrained(text).get_input_embeddings().weight
    rows = model.get_input_embeddings().weight
    assert len(before) <= model.config.image_token_id < len(rows) and len(rows) % 64 == 0
    assert torch.equal(rows[: len(before)], before)
    assert torch.allclose(rows[len(before) :], before.mean(0).expand(len(rows) - len(before), -1), atol=1e-6)


def test_the_processor_writes_as_many_tokens_as_the_tower_gives(tmp_path: Path) -> None:
    vision, text = save_tower("clip", tmp_path / "tower"), save_decoder("qwen2", tmp_path / "decoder")
    folder = compose(vision, text, tmp_path / "made").folder
    processor = AutoProcessor.from_pretrained(folder)
    content = [{"type": "image"}, {"type": "text", "text": "What is it?"}]
    turns = [{"role": "user", "content": content}, {"role": "assistant", "content": "A square."}]
    written = processor.apply_chat_template(turns)
    assert "<|im_start|>user\n<|image_pad|>\nWhat is it?<|im_end|>" in written and "A square.<|im_end|>" in written
    inputs = processor(images=[Image.new("RGB", (80, 30))], text=written, return_tensors="pt")
    model = AutoModelForImageTextToText.from_pretrained(folder)
    assert int((inputs["input_ids"] == model.config.image_token_id).sum()) == 16
    assert model(**inputs).logits.isfinite().all()


def test_a_decoder_without_a_template_gets_llavas(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(CORPUS, 300)
    tokenizer.chat_template = None
    token = add_image_token(tokenizer)
    template = written_with_images(tokenizer, token)
    turn = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]}
    text = tokenizer.apply_chat_template([turn], chat_template=template, tokenize=False, add_generation_prompt=True)
    assert text == f"USER: {token}\nWhat is it? ASSISTANT: "


@pytest.mark.parametrize(
    ("tower", "decoder", "message"),
    [
        ("clip", "granite", r"GraniteForCausalLM computes logits in a way that .* does not have \(they differ"),
        ("clip", "gemma2", r"does not have \(a soft cap at 30.0\)"),
        ("llama", "llama", "llama is no tower that cuts pictures"),
        ("clip", "clip", "clip is no decoder|has a vision tower of its own"),
        ("clip", "llava", "llava has a vision tower of its own"),
        ("llava", "llama", "llava is a vision-language model by itself"),
        ("nowhere", "llama", "no usable model configuration"),
    ],
)  # fmt: skip
def test_what_cannot_be_composed(tower: str, decoder: str, message: str, tmp_path: Path) -> None:
    folders = {}
    for name in {tower, decoder}:
        folders[name] = str(tmp_path / name)
        if name in DECODERS:
            save_decoder(name, tmp_path / name)
        elif name == "llava":
            make_family(name, tmp_path / name)
        elif name != "nowhere":
            save_tower(name, tmp_path / name)
    with pytest.raises(ModelError, match=message):
        compose(folders[tower], folders[decoder], tmp_path / "made")
    assert not (tmp_path / "made").exists()


def test_missing_files_are_named(tmp_path: Path) -> None:
    vision, text = save_tower("clip", tmp_path / "tower"), save_decoder("llama", tmp_path / "decoder")
    (tmp_path / "decoder" / "tokenizer.json").unlink()
    (tmp_path / "decoder" / "tokenizer_config.json").unlink()
    with pytest.raises(ModelError, match="decoder: no usable tokenizer"):
        compose(vision, text, tmp_path / "made")
    (tmp_path / "tower" / "preprocessor_config.json").unlink()
    with pytest.raises(ModelError, match="tower: no usable image processor"):
        compose(vision, text, tmp_path / "made")
    (tmp_path / "made").mkdir()
    with pytest.raises(ModelError, match="made exists; name a new directory"):
        compose(vision, text, tmp_path / "made")


def test_an_image_processor_of_another_size_is_refused(tmp_path: Path) -> None:
    vision, text = save_tower("siglip", tmp_path / "tower"), save_decoder("llama", tmp_path / "decoder")
    SiglipImageProcessorPil(size={"height": 28, "width": 28}).save_pretrained(vision)
    with pytest.raises(ModelError, match=r"makes pictures of \(28, 28\) pixels, 4 tokens, and the tower sees 56 × 56"):
        compose(vision, text, tmp_path / "made")


def test_the_command_reads_its_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    vision, text = save_tower("clip", tmp_path / "tower"), save_decoder("llama", tmp_path / "decoder")
    own = [f"vision={vision}", f"text={text}", f"out={tmp_path / 'made'}"]
    assert main(["compose", *own, "sed=1"]) == 1
    assert "sed=1 is no setting of compose; did you mean seed?" in capsys.readouterr().err
    assert main(["compose", *own[:2]]) == 1
    assert "out= is missing" in capsys.readouterr().err
    assert main(["compose", *own, "seed=-1"]) == 1
    assert "seed=-1 is no whole number" in capsys.readouterr().err
    assert main(["compose", *own]) == 0
    assert "becomes 16 tokens <|image_pad|>" in capsys.readouterr().out


FAMILIES = (
    "aya_vision", "gemma3", "glm4v", "idefics3", "internvl", "llava", "llava_next", "llava_onevision", "ovis2",
    "qwen2_5_vl", "qwen2_vl", "qwen3_vl",
)  # fmt: skip
NEW, OLD = {"rope_parameters", "dtype"}, {"rope_theta", "rope_scaling", "rope_local_base_freq", "torch_dtype"}


def without(content: Any, keys: set[str]) -> Any:
    if not isinstance(content, dict):
        return content
    kept = {key: value for key, value in content.items() if key not in keys}
    return {key: value if key in NEW else without(value, keys) for key, value in kept.items()}


def export(source: Path, out: Path) -> Path:
    model = AutoModelForImageTextToText.from_pretrained(source, dtype=torch.float32)
    weights = {name: one.detach() for name, one in model.named_parameters()} | persistent_buffers(model)
    save_whole(source, weights, out)
    return out


def forms(name: str, folder: Path) -> dict[str, Path]:
    """One model: as published, its export, in version 5's form, and the export of that."""
    made = make_family(name, folder / "made")
    change_positions(made, rope_theta=1e6)  # as a stage of a curriculum
    content = read_config(made)
    if name == "gemma3":
        own = content["text_config"]["rope_parameters"]["full_attention"]
        own |= {"rope_type": "linear", "factor": 8.0}
        content["text_config"] |= flat_rope(content["text_config"]["rope_parameters"])
    found = {}
    for form, keys in (("published", NEW), ("new", OLD)):
        found[form] = Path(shutil.copytree(made, folder / form))
        (found[form] / "config.json").write_text(json.dumps(without(content, keys)))
        found[f"{form}_export"] = export(found[form], folder / f"{form}_export")
    return {"made": made, **found}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, dict[str, Tensor]]:
    """Logits by version and name/form."""
    four = install(request.config.cache.mkdir("models"))
    root = tmp_path_factory.mktemp("families")
    models = {f"{name}/{form}": path for name in FAMILIES for form, path in forms(name, root / name).items()}
    compose(save_tower("siglip", root / "tower"), save_decoder("qwen2", root / "decoder"), root / "composed")
    models["composed"] = root / "composed"
    del models["gemma3/made"]  # which has no scaling
    readable = {key: path for key, path in models.items() if not key.endswith("/new")}
    return {
        "5": dict(zip(models, logits("5", None, list(models.values())), strict=True)),
        "4": dict(zip(readable, logits("4", four, list(readable.values())), strict=True)),
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_an_export_is_the_same_model_in_both_versions(name: str, seen: dict[str, dict[str, Tensor]]) -> None:
    wanted = seen["5"][f"{name}/published"]
    for found in seen.values():
        forms = {key: one for key, one in found.items() if key.startswith(f"{name}/")}
        apart = {key: float((one - wanted).abs().max()) for key, one in forms.items()}
        assert len(apart) >= 3 and max(apart.values()) <= 1e-5 * float(wanted.abs().max()), apart


@pytest.mark.slow
def test_a_composed_model_is_the_same_in_both_versions(seen: dict[str, dict[str, Tensor]]) -> None:
    assert torch.allclose(seen["4"]["composed"], seen["5"]["composed"], atol=1e-5)


def test_a_published_file_is_exported_as_it_stands(tmp_path: Path) -> None:
    source = make_family("qwen2_5_vl", tmp_path / "made")
    content = without(read_config(source), NEW) | {"torch_dtype": "bfloat16", "of_their_own": [1]}
    content["text_config"]["rope_scaling"]["type"] = content["text_config"]["rope_scaling"].pop("rope_type")
    (source / "config.json").write_text(json.dumps(content))
    written = read_config(export(source, tmp_path / "out"))
    assert written == content | {"torch_dtype": "float32"} and list(written) == list(content)


def test_keys_of_version_4_that_would_change_the_model_here_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_family("llava", tmp_path / "made")
    content = without(read_config(source), OLD)
    monkeypatch.setattr(config_file, "flat_rope", lambda rope: {"rope_scaling": {"rope_type": "linear", "factor": 2.0}})
    write_config(source, content)
    assert read_config(source) == content


@pytest.mark.parametrize(
    "rope, flat",
    [
        ({"rope_type": "default", "rope_theta": 5.0}, {"rope_theta": 5.0}),
        (
            {"rope_type": "default", "rope_theta": 5.0, "partial_rotary_factor": 0.5, "mrope_section": [1, 2]},
            {
                "rope_theta": 5.0,
                "partial_rotary_factor": 0.5,
                "rope_scaling": {"rope_type": "default", "mrope_section": [1, 2]},
            },
        ),
        (
            {
                "full_attention": {"rope_type": "linear", "rope_theta": 5.0, "factor": 8.0},
                "sliding_attention": {"rope_theta": 2.0},
            },
            {"rope_theta": 5.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_local_base_freq": 2.0},
        ),
        ({"rope_type": "proportional", "rope_theta": 5.0}, {"rope_theta": 5.0}),
        ({"full_attention": {"rope_theta": 5.0}, "chunked_attention": None}, {}),
    ],
)
def test_rotary_positions_in_keys_of_version_4(rope: dict[str, Any], flat: dict[str, Any]) -> None:
    assert flat_rope(rope) == flat
