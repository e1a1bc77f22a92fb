"""Runs with adapters or experts, to their export."""

import json
import math
import re
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer, Qwen3VLMoeConfig

from dhp.__main__ import main
from dhp.cli.export import main as export
from dhp.config.command_line import compose_config
from dhp.core.errors import ConfigError
from dhp.core.parameters import is_adapter
from dhp.trainer.dry_run import dry_run
from dhp.trainer.preflight import prepare
from tests.checkpoint.test_damage import rewrite_about
from tests.helpers.runs import ONE_ACTOR_EACH, Outcome, tiny, train

SHARED = ["text.parallelism=data", "text.num_actors=2", "text.expert=2"]
CUT = ["text.parallelism=tensor", "text.num_actors=4", "text.data=2", "text.expert=2", "text.zero_stage=3"]


@pytest.fixture(scope="module")
def model(tiny_assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3-VL with 4 experts and a load-balancing loss, and the tiny model's tokenizer and image processor."""
    folder, theirs = tmp_path_factory.mktemp("models") / "experts", tiny_assets / "model"
    tokens, plain = AutoTokenizer.from_pretrained(theirs), AutoConfig.from_pretrained(theirs)
    text = {
        "vocab_size": plain.text_config.vocab_size, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16, "output_router_logits": True, "router_aux_loss_coef": 0.01,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]},
    }  # fmt: skip
    vision = {
        "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "patch_size": 14, "out_hidden_size": 32,
        "num_position_embeddings": 25, "deepstack_visual_indexes": [0],
    }  # fmt: skip
    named = {f"{kind}_token_id": tokens.convert_tokens_to_ids(f"<|{kind}_pad|>") for kind in ("image", "video")}
    named |= {f"vision_{end}_token_id": tokens.convert_tokens_to_ids(f"<|vision_{end}|>") for end in ("start", "end")}
    torch.manual_seed(0)
    config = Qwen3VLMoeConfig(text_config=text, vision_config=vision, tie_word_embeddings=False, **named)
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    for file in theirs.iterdir():
        if not (folder / file.name).exists():
            shutil.copy(file, folder)
    return folder


def overrides(model: Path, *more: str) -> list[str]:
    one = ["vision.parallelism=none", "vision.num_actors=1", "vision.zero_stage=0"]
    return [f"vision.model_name={model}", f"text.model_name={model}", *one, *more]


@pytest.mark.slow
@pytest.mark.parametrize("layout", [SHARED, CUT], ids=["shared out", "shared out, cut, fsdp"])
def test_a_run_trains_saves_and_is_exported(layout: list[str], tiny_assets: Path, model: Path, tmp_path: Path) -> None:
    steps = ["training.max_steps=3", "training.batch_size=4", "training.micro_batch_size=1", "cluster.device=cpu"]
    steps.append("training.log_interval=2")
    outcome = train(*tiny(tiny_assets, tmp_path / "run", *overrides(model, *layout, *steps)))
    assert outcome.status == 0, outcome.stderr
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(math.isfinite(line["loss"]) and line["loss"] > 0 for line in lines)
    assert lines[0]["comm_bytes"]["text"]["all_to_all"] > 0
    first, load, last = (line["expert_load"] for line in lines)
    assert first is None and last is None  # an actor has 2 of 4 experts, of which a token visits 2
    assert all(1 <= load["busiest"][layer] <= load["hottest"][layer] <= 2 for layer in ("0", "1"))
    export([str(tmp_path / "run"), str(tmp_path / "out")])
    found = dict(AutoModelForImageTextToText.from_pretrained(tmp_path / "out").named_parameters())
    before = dict(AutoModelForImageTextToText.from_pretrained(model).named_parameters())
    assert found.keys() == before.keys()
    for layer in range(2):
        trained = found[f"model.language_model.layers.{layer}.mlp.experts.down_proj"]
        moved = trained - before[f"model.language_model.layers.{layer}.mlp.experts.down_proj"]
        assert (moved.flatten(1).norm(dim=1) > 0).all()  # each of the experts, whoever holds it


def _prepared(tiny_assets: Path, model: Path, *more: str) -> str:
    given = [f"tiny_assets={tiny_assets}", "training.dry_run=true", *overrides(model, *more)]
    return dry_run(prepare(compose_config("tiny", overrides=given), new_run=False))


def test_a_dry_run_counts_a_share_of_the_experts(tiny_assets: Path, model: Path) -> None:
    rows = {}
    for more in (SHARED, [*SHARED, "text.expert=1"]):
        (row,) = (n for n in _prepared(tiny_assets, model, *more).splitlines() if n.startswith("text ") and "fl" in n)
        rows["(expert 2)" in row] = [int(word.replace(",", "")) for word in re.findall(r"\d+,\d{3}", row)]
    experts = 2 * 4 * 3 * 16 * 32  # layers, experts, matrices
    whole, _, _ = rows[False]
    assert rows[True] == [whole, whole - experts // 2, whole - experts]


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (
            ["text.num_actors=6", "text.expert=3", "training.batch_size=24"],
            "experts.4. % expert.3. = 1 .* Set text.expert=2",
        ),
        (["text.pipeline=2", "text.num_actors=2"], "text.pipeline=2 of a decoder with a load-balancing loss"),
        (["text.parallelism=autotp", "text.num_actors=2"], "text.parallelism=autotp with text.tensor=2"),
        (["text.zero_stage=1", "text.num_actors=2", "text.expert=2"], "zero_stage=1 with .* and text.expert=2"),
    ],
)
def test_what_cannot_be_is_told_before_any_actor(tiny_assets: Path, model: Path, more: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        _prepared(tiny_assets, model, "text.parallelism=data", *more)


OF_EXPERTS = ["text.lora.rank=2", "text.lora.targets=[experts,q_proj]", "training.frozen=[vision,projector]"]


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["text.parallelism=tensor", "text.num_actors=2"], "text.tensor=2: an actor has a slice of each expert's"),
        ([*SHARED, "vision.zero_stage=0"], "text.expert=2: an actor has some of the experts"),
        (["text.parallelism=data", "text.num_actors=2", "text.zero_stage=2"], "text.zero_stage=2: adapters of experts"),
        (["text.compile=true"], "text.compile=true: .* not compiled. Set text.compile=false, or name no experts in"),
        (["text.lora.dropout=0.1"], "text.lora.dropout=0.1: .* of no states could some be left out"),
        (["text.lora.dora=true"], "text.lora.dora=true: peft's adapters of experts train no norms"),
    ],
)
def test_layouts_without_adapters_of_experts_say_so(tiny_assets: Path, model: Path, more: list[str], told: str) -> None:
    alone = [] if any("parallelism" in one for one in more) else ["text.parallelism=none", "text.num_actors=1"]
    with pytest.raises(ConfigError, match=f"text.lora.targets.* with {told}"):
        _prepared(tiny_assets, model, *OF_EXPERTS, *alone, *more)


def test_a_dry_run_counts_adapters_of_experts(tiny_assets: Path, model: Path) -> None:
    found = _prepared(tiny_assets, model, *OF_EXPERTS, "text.parallelism=none", "text.num_actors=1")
    of_experts = 2 * 2 * 4 * (32 + 32 + 16 + 32)  # layers, rank, experts, sides of both matrices
    of_queries = 2 * 2 * (32 + 32)
    assert f"{of_experts + of_queries:,}" in found


@pytest.mark.slow
def test_a_run_begins_from_anothers_adapters_of_experts(tiny_assets: Path, model: Path, tmp_path: Path) -> None:
    steps = ["training.max_steps=2", "training.batch_size=4", "training.micro_batch_size=1", "cluster.device=cpu"]
    two = ["text.parallelism=data", "text.num_actors=2", "training.learning_rate=0.01", "training.warmup_ratio=0"]
    ended = train(*tiny(tiny_assets, tmp_path / "one", *overrides(model, *OF_EXPERTS, *two, *steps)))
    assert ended.status == 0, ended.stderr
    assert main(["export", str(tmp_path / "one"), str(tmp_path / "merged")]) == 0
    assert main(["export", str(tmp_path / "one"), str(tmp_path / "adapter"), "--adapter"]) == 0
    load = lambda folder: AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    merged, by_peft = load(tmp_path / "merged"), PeftModel.from_pretrained(load(model), tmp_path / "adapter")
    theirs = dict(by_peft.merge_and_unload().named_parameters())
    before = dict(load(model).named_parameters())
    for name, weight in merged.named_parameters():
        torch.testing.assert_close(weight, theirs[name], rtol=0, atol=1e-7)
        assert torch.equal(weight, before[name]) != (".experts." in name or "q_proj" in name)
    still = ["training.learning_rate=1e-30", f"text.lora.begin_from={tmp_path / 'adapter'}", "training.weight_decay=0"]
    ended = train(*tiny(tiny_assets, tmp_path / "two", *overrides(model, *OF_EXPERTS, *two, *steps, *still)))
    assert ended.status == 0, ended.stderr
    assert main(["export", str(tmp_path / "two"), str(tmp_path / "again")]) == 0
    again = dict(load(tmp_path / "again").named_parameters())
    assert not [name for name, weight in merged.named_parameters() if not torch.equal(again[name], weight)]


ADAPTERS = ["text.lora.rank=4", "training.frozen=[vision]", "training.max_steps=2", "training.warmup_ratio=0"]


@pytest.fixture(scope="module")
def trained(tiny_assets: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    run_dir = tmp_path_factory.mktemp("adapters") / "run"
    often = ["training.save_steps=1", "training.eval_steps=1", "data.eval_datasets=['shapes%5']"]
    return run_dir, train(*tiny(tiny_assets, run_dir, *ONE_ACTOR_EACH, *ADAPTERS, *often))


@pytest.mark.slow
def test_its_table_and_its_checkpoint_have_the_adapters(trained: tuple[Path, Outcome]) -> None:
    run_dir, ended = trained
    assert ended.status == 0, ended.stderr
    rows = {tuple(line.split()[:2]) for line in ended.stdout.splitlines()}
    assert {("text", "adapters"), ("text", "frozen"), ("vision", "frozen"), ("projector", "vision")} <= rows
    (file,) = (run_dir / "checkpoints" / "step_2" / "text").glob("rank_*.safetensors")
    with safe_open(file, framework="pt") as held:
        assert held.keys() and all(map(is_adapter, held.keys()))


@pytest.mark.slow
def test_it_is_exported_merged_and_as_an_adapter(trained: tuple[Path, Outcome], tiny_assets: Path) -> None:
    run_dir, _ = trained
    assert main(["export", str(run_dir), str(run_dir / "merged")]) == 0
    assert main(["export", str(run_dir), str(run_dir / "adapter"), "--adapter"]) == 0
    load = lambda folder: AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    merged, plain = load(run_dir / "merged"), load(tiny_assets / "model")
    theirs = dict(PeftModel.from_pretrained(plain, run_dir / "adapter").merge_and_unload().named_parameters())
    for name, weight in merged.named_parameters():
        torch.testing.assert_close(weight, theirs[name], rtol=0, atol=1e-7)
    before = dict(load(tiny_assets / "model").named_parameters())
    moved = {name for name, weight in merged.named_parameters() if not torch.equal(weight, before[name])}
    assert any("q_proj" in name for name in moved) and not any("blocks" in name for name in moved)


@pytest.mark.slow
def test_its_checkpoints_are_evaluated_with_their_adapters(trained: tuple[Path, Outcome]) -> None:
    run_dir, _ = trained
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    first, last = (line["loss"] for line in lines if line["kind"] == "eval")
    again = train("evaluate", "loss", str(run_dir / "checkpoints" / "step_1"), "--json", module="dhp")
    assert again.status == 0, again.stderr
    assert json.loads(again.stdout)["loss"] == first != last


@pytest.mark.slow
def test_it_goes_on_with_the_same_adapters_alone(trained: tuple[Path, Outcome], tiny_assets: Path) -> None:
    run_dir, _ = trained
    asked = tiny(tiny_assets, run_dir, *ONE_ACTOR_EACH, *ADAPTERS, "training.resume=auto", "text.lora.rank=8")
    refused = train(*asked)
    assert (
        refused.status == 1
        and "a checkpoint holds weights and optimizer states of what its run trained" in refused.stderr
    )
    assert "lora was" in refused.stderr


@pytest.mark.slow
def test_whole_weights_are_no_adapter(trained: tuple[Path, Outcome], capsys: pytest.CaptureFixture[str]) -> None:
    run_dir, _ = trained
    about = run_dir / "checkpoints" / "step_1" / "checkpoint.json"
    told = json.loads(about.read_text())
    rewrite_about(about.parent, told | {"settings": told["settings"] | {"lora": {}}})
    assert main(["export", str(about.parent), str(run_dir / "none"), "--adapter"]) == 1
    assert "has no adapters" in capsys.readouterr().err
