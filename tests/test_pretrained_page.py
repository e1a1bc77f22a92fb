"""LOAD_PRETRAINED_WEIGHTS.md: its sizes are those of the shapes, and refusals read as it shows them."""

import re
import shutil
from pathlib import Path

import pytest

from dhp.config.command_line import compose_config
from dhp.core.errors import DhpError
from dhp.core.parameters import EXACT_STATES, FORMS
from dhp.models.empty import part_shape
from dhp.models.pretrained import shapes_directory
from dhp.trainer.preflight import prepare
from tests.helpers.runs import ROOT

PAGE = (ROOT / "LOAD_PRETRAINED_WEIGHTS.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("size", ["3B", "7B", "32B", "72B"])
def test_sizes_are_those_of_the_shapes(size: str) -> None:
    shape = shapes_directory() / "Qwen" / f"Qwen2.5-VL-{size}-Instruct.json"
    count = part_shape(str(shape), ()).total
    saved = 2 + 4 + 8  # the weight in bfloat16, its master, AdamW's moments in float32
    assert f"| {size} | {count:,} | {2 * count / 1e9:.1f} GB | {saved * count / 1e9:,.1f} GB |" in PAGE
    assert EXACT_STATES == saved + 4 and {12, 10} <= set(FORMS)  # the sum of gradients is in no checkpoint


def refusals() -> list[list[str]]:
    """What the last column of the table quotes, row by row."""
    section = PAGE[PAGE.index("## What is checked") : PAGE.index("## Who reads what")]
    return [re.findall(r"`([^`]+)`", row.split("|")[2]) for row in section.splitlines() if row.startswith("| ")][1:]


@pytest.mark.parametrize(("row", "broken"), list(enumerate(["path", "", "heads", "index", "pickle"])))
def test_refusals_read_as_the_page_has_them(row: int, broken: str, tiny_assets: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_assets / "model", tmp_path / "model")
    settings = [f"tiny_assets={tiny_assets}", f"run_dir={tmp_path / 'run'}"]
    if broken == "index":
        (folder / "model.safetensors.index.json").write_text(
            '{"weight_map": {"a": "model-00002-of-00002.safetensors"}}'
        )
    elif broken == "pickle":
        (folder / "model.safetensors").unlink()
        (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    elif not broken:
        (folder / "config.json").write_text('{"model_type": "bert"}')
    if broken == "heads":
        config = compose_config(
            "qwen2_5_vl_7b", overrides=["text=tensor", "text.num_actors=32", "text.tensor=32", "text.data=1"]
        )
        config.training.dry_run = True
    else:
        named = Path("/models/Qwen") if broken == "path" else folder
        models = [f"{part}.model_name={named}" for part in ("vision", "text")]
        config = compose_config("tiny", overrides=[*settings, *models])
    with pytest.raises(DhpError) as caught:
        prepare(config)
    quoted = refusals()[row]
    assert quoted and [piece for piece in quoted if piece not in str(caught.value)] == []
