"""A run with adapters, from the command to the adapter that peft loads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from transformers import AutoModelForImageTextToText

from dhp.__main__ import main
from dhp.core.parameters import is_adapter
from tests.checkpoint.test_damage import rewrite_about
from tests.helpers.runs import ONE_ACTOR_EACH, Outcome, tiny, train

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
