"""A model with experts through the real entry: shared out, saved, exported; and what is refused before."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer, Qwen3VLMoeConfig

from dhp.cli.export import main as export
from dhp.config.command_line import compose_config
from dhp.core.errors import ConfigError
from dhp.trainer.dry_run import dry_run
from dhp.trainer.preflight import prepare
from tests.helpers.runs import tiny, train

SHARED = ["text.parallelism=data", "text.num_actors=2", "text.expert=2"]


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
def test_a_run_trains_saves_and_is_exported(tiny_assets: Path, model: Path, tmp_path: Path) -> None:
    steps = ["training.max_steps=3", "training.batch_size=4", "training.micro_batch_size=1", "cluster.device=cpu"]
    outcome = train(*tiny(tiny_assets, tmp_path / "run", *overrides(model, *SHARED, *steps)))
    assert outcome.status == 0, outcome.stderr
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(math.isfinite(line["loss"]) and line["loss"] > 0 for line in lines)
    assert lines[0]["comm_bytes"]["text"]["all_to_all"] > 0
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
        (["text.zero_stage=1", "text.num_actors=2", "text.expert=2"], "text.expert=2 with text.zero_stage=1"),
    ],
)
def test_what_cannot_be_is_told_before_any_actor(tiny_assets: Path, model: Path, more: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        _prepared(tiny_assets, model, "text.parallelism=data", *more)
