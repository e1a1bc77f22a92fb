"""A dry run: numbers held against hand-computed ones, every ready-made configuration, and nothing left behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from dhp.config.command_line import compose_config
from dhp.config.schema import Config
from dhp.core.errors import ConfigError
from dhp.models.registry import load_family
from dhp.models.shape import PartShape
from dhp.plan.count.state_bytes import RankBytes, rank_bytes
from dhp.plan.run_plan import plan_run
from dhp.plan.stage_graph import make_graph
from dhp.trainer.dry_run import dry_run, stage_shapes
from dhp.trainer.preflight import prepare
from tests.helpers.rows import slow
from tests.helpers.runs import tiny, train

VISION, TEXT, TEXT_RANK = 98_528, 127_552, 63_936  # parameters; tests/models/test_shape.py adds them up


def prepared(name: str, *overrides: str) -> Config:
    return prepare(compose_config(name, overrides=["training.dry_run=true", *overrides]))


def test_bytes_of_each_rank_by_hand(tiny_assets: Path, made_model: str, tmp_path: Path) -> None:
    models = (f"vision.model_name={made_model}", f"text.model_name={made_model}")
    config = prepared(
        "tiny", f"tiny_assets={tiny_assets}", f"run_dir={tmp_path / 'run'}", "cluster.device=cpu", *models
    )
    graph = make_graph(config, load_family(made_model), made_model)
    shapes = stage_shapes(plan_run(config, made_model))
    assert shapes["vision"] == PartShape(VISION, VISION, VISION, small=VISION)
    assert shapes["text"] == PartShape(TEXT, TEXT_RANK, 320, small=TEXT_RANK)
    vision, text = (rank_bytes(getattr(config, s.part), s, shapes[s.name]) for s in graph.stages)
    assert vision == RankBytes(4 * VISION, 4 * VISION, 4 * 3 * VISION // 2)  # ZeRO-1 over two ranks
    assert text == RankBytes(4 * TEXT_RANK, 4 * TEXT_RANK, 4 * 2 * TEXT_RANK)
    printed = dry_run(config)
    for row in (
        ["vision", "ulysses", "2,", "zero_stage", "1,", "float32", "2", "98,528", "98,528", "98,528"],
        ["text", "tensor", "2,", "float32", "2", "127,552", "63,936", "320"],
    ):
        (line,) = (line.split() for line in printed.splitlines() if line.startswith(row[0] + " ") and "float" in line)
        assert line[: len(row)] == row
    states = 14 * VISION + 16 * TEXT_RANK
    loss = 256 * (2048 * 16 + 64 * 8)  # half the vocabulary: logits and slopes of a chunk, the head's gradient twice
    bucket = 4 * VISION  # of gradients that DeepSpeed sends at once
    assert f"fullest device {(states + loss + bucket) / 1e6:.3f} MB without activations, " in printed
    assert "[1.379 MB]" in printed and "[1.023 MB]" in printed  # the chosen stage of each part
    assert "8 samples = text.data 1 × micro_batch_size 4 × 2 micro-batches" in printed


@pytest.mark.slow
def test_a_dry_run_names_the_form_of_a_part_that_has_another(tmp_path: Path) -> None:
    asked = ("text.state_bytes=12", f"run_dir={tmp_path / 'run'}")
    printed = dry_run(prepared("qwen2_5_vl_32b", *asked))
    (line,) = (line for line in printed.splitlines() if line.startswith("text ") and "bfloat16" in line)
    assert "zero_stage 3, bfloat16, state_bytes 12 " in line
    assert line.split()[-6:] == ["0.000", "MB", "8.2", "GB", "16.4", "GB"]  # 4 and 8 bytes of 32.8 B over 16 ranks
    (row,) = (line for line in printed.splitlines() if line.startswith("text ") and "[" in line)
    assert row.split()[1:] == ["393.2", "GB", "-", "90.1", "GB", "[24.6", "GB]"]
    assert "of moments a" not in printed
    assert "written behind steps: 1.9 GB a vision rank, 16.4 GB a text rank at most" in printed  # 8 of these bytes
    elsewhere = dry_run(prepared("qwen2_5_vl_32b", *asked, "text.host_moments=true"))
    assert "\nhost memory    8.2 GB of moments a text rank\n" in elsewhere  # 4 bytes of 32.8 B over 16 ranks


# What activations of a row of 16384 tokens take on each of its two actors where layers are recomputed whole: what
# enters each layer (2h bytes a token), and inside one (16h + 8 + 2(2h + 2g) + 8i / chunks + 4n, for h hidden, g key and
# value width, i inner, n heads); and of 20,000 patches what enters 32 layers of the tower.
INSIDE_32B = 16 * 5120 + 8 + 2 * (2 * 5120 + 2 * 1024) + 8 * 27648 // 8 + 4 * 40
INSIDE_72B = 16 * 8192 + 8 + 2 * (2 * 8192 + 2 * 1024) + 8 * 29568 // 8 + 4 * 64
TOWER = 20_000 * 32 * 2 * 1280


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "device", "activations"),
    [
        ("32b_8gpus", "70.7 GB", 8192 * (64 * 2 * 5120 + INSIDE_32B) + TOWER),
        ("72b_32gpus", "56.9 GB", 8192 * (80 * 2 * 8192 + INSIDE_72B) + TOWER),
    ],
)
def test_large_models_on_fewer_devices_fit_with_a_row_of_16k(
    name: str, device: str, activations: int, tmp_path: Path
) -> None:
    run = f"run_dir={tmp_path / 'run'}"
    printed = dry_run(prepared(f"qwen2_5_vl_{name}", run))
    assert f"fullest device {device} without activations, " in printed
    assert float(device.split()[0]) + activations / 1e9 < 80
    if name == "32b_8gpus":  # with all states in float32 it would not
        exact = dry_run(prepared(f"qwen2_5_vl_{name}", run, "text.state_bytes=18"))
        assert "fullest device 87.1 GB without activations, " in exact


@pytest.mark.parametrize(
    ("name", "device"), [("3b", "33.9 GB"), slow("7b", "51.7 GB"), slow("32b", "57.7 GB"), slow("72b", "29.7 GB")]
)
def test_each_ready_made_configuration_passes_without_a_download(name: str, device: str, tmp_path: Path) -> None:
    printed = dry_run(prepared(f"qwen2_5_vl_{name}", f"run_dir={tmp_path / 'run'}"))
    assert f"fullest device {device} without activations, " in printed
    assert float(device.split()[0]) <= 58.0  # of 80, so that activations have the rest, which each file counts
    assert "data.data_registry.train.annotation_path=" in printed
    assert printed.endswith("every check but these of the data passed; nothing was started")


@pytest.mark.parametrize(("name", "device"), [("7b_tensor", "45.3 GB"), slow("32b_8gpus_tensor", "58.6 GB")])
def test_the_layouts_beside_them_fit_and_choose_what_is_recomputed(name: str, device: str, tmp_path: Path) -> None:
    config = prepared(f"qwen2_5_vl_{name}", f"run_dir={tmp_path / 'run'}")
    assert (config.vision.recompute, config.text.recompute, config.cluster.collocate) == ("auto", "auto", True)
    printed = dry_run(config)
    assert f"fullest device {device} without activations, " in printed
    assert "planned        fits: " in printed and "of 75.1 GiB" in printed


def test_rows_are_assumed_as_the_plan_makes_them_and_a_limit_that_none_reaches_is_named(tmp_path: Path) -> None:
    run = f"run_dir={tmp_path / 'run'}"
    printed = dry_run(prepared("qwen2_5_vl_3b", run, "data.limits.vision=null"))
    assert "rows hold 2,048 tokens in the mean, not data.limits.text=8192: data.limits.vision is null" in printed
    assert "Set data.limits.vision=8192" in printed and "micro-batches of 1 sample of 2,048 tokens" in printed
    whole = dry_run(prepared("qwen2_5_vl_3b", run))
    assert "rows hold" not in whole and "micro-batches of 4 samples of 2,048 tokens" in whole
    assert "a step         32 rows = text.data 4 × 8 micro-batches" in whole


def test_degrees_are_checked_against_the_shipped_shape() -> None:
    with pytest.raises(ConfigError, match=r"heads\(28\) % tensor\(8\)"):
        prepared("qwen2_5_vl_7b", "text=tensor", "text.num_actors=8", "vision.num_actors=8")


def test_parts_on_devices_of_their_own(tiny_assets: Path, tmp_path: Path) -> None:
    overrides = (f"tiny_assets={tiny_assets}", f"run_dir={tmp_path / 'run'}", "cluster.collocate=false")
    printed = dry_run(prepared("tiny", *overrides))
    assert "devices        4: one rank each" in printed


def test_stages_of_a_pipeline_and_their_clock(tiny_assets: Path, made_model: str, tmp_path: Path) -> None:
    models = (f"vision.model_name={made_model}", f"text.model_name={made_model}")
    assets = (f"tiny_assets={tiny_assets}", f"run_dir={tmp_path / 'run'}")
    cut = ("text.parallelism=pipeline", "text.num_actors=2", "training.schedule=1f1b", "training.batch_size=16")
    printed = dry_run(
        prepared("tiny", *assets, *models, *cut, "training.frozen=[vision,projector]", "vision.zero_stage=0")
    )
    assert "text layers    text.0 0-0; text.1 1-1" in printed
    assert "devices        2: 2 with a rank of both parts, 0 with one rank" in printed
    (tower,) = (line for line in printed.splitlines() if line.startswith("vision ") and "float" in line)
    assert "frozen" in tower and tower.split()[-4:] == ["0.000", "MB", "0.000", "MB"]
    assert "  text.0 . 0 1 .  0' 2  1' 3  2' .  3'" in printed
    assert "text cuts      exact, no cut is faster" in printed
    assert "assumed        micro-batches of 4 samples of 2,048 tokens" in printed
    (bubble,) = (line for line in printed.splitlines() if line.startswith("bubble  "))
    assert all(f"{stage} " in bubble for stage in ("vision", "text.0", "text.1"))
    (waiting,) = (line for line in printed.splitlines() if line.startswith("waiting "))
    assert "text.0" in waiting and "for text.1" in waiting
    kept = [line for line in printed.splitlines() if line.endswith("of activations")]
    assert [line.split()[0] for line in kept] == ["text.0", "text.1"]  # the tower is frozen


def test_a_chain_is_shown_as_one(tiny_assets: Path, made_model: str, tmp_path: Path) -> None:
    """Why both parts are cut so, their stages in time, and the device that they share."""
    models = (f"vision.model_name={made_model}", f"text.model_name={made_model}")
    assets = (f"tiny_assets={tiny_assets}", f"run_dir={tmp_path / 'run'}", "vision.zero_stage=0")
    cut = ("text.parallelism=pipeline", "text.num_actors=2", "training.schedule=1f1b", "training.batch_size=8")
    chain = ("cluster.chain=true", "vision.parallelism=pipeline", "vision.num_actors=2")
    lines = dry_run(prepared("tiny", *assets, *models, *cut, *chain)).splitlines()
    (why,) = (line for line in lines if "cuts  " in line)
    assert why.startswith("cuts           exact, no cut is faster") and why.endswith("vision and text as one chain")
    (at,) = (at for at, line in enumerate(lines) if line.startswith("in time "))
    assert [line.split()[0] for line in lines[at + 1 : at + 5]] == ["vision.0", "vision.1", "text.0", "text.1"]
    assert "devices        3: 1 with a rank of both parts, 2 with one rank" in lines
    by_hand = dry_run(prepared("tiny", *assets, *models, *cut, *chain, "vision.cuts=[1]", "text.cuts=[1]"))
    assert "vision cuts    as vision.cuts has them" in by_hand and "text cuts      as text.cuts has them" in by_hand


def test_layers_that_go_forward_again_are_marked(tiny_assets: Path, made_model: str, tmp_path: Path) -> None:
    models = (f"vision.model_name={made_model}", f"text.model_name={made_model}")
    assets = (f"tiny_assets={tiny_assets}", f"run_dir={tmp_path / 'run'}", "text.recompute=0")
    cut = ("text.parallelism=pipeline", "text.num_actors=2", "training.schedule=1f1b", "training.batch_size=16")
    printed = dry_run(prepared("tiny", *assets, *models, *cut, "text.cuts=[1]"))
    assert '  text.0 . 0 1 .  0" 2  1" 3  2" .  3" .' in printed and "  text.1 . . 0 0' 1  1' 2" in printed
    assert "text cuts      as text.cuts has them" in printed and "go forward again" in printed


@pytest.mark.parametrize(
    ("cut", "told"),
    [
        (["text.num_actors=3"], r"pipeline\(3\) × virtual_stages\(1\) = 3 > layers\(2\)"),
        (
            ["text.num_actors=2", "text.cuts=[2]"],
            r"text.cuts=\[2\] cannot cut the 2 layers of text: 0 < 2 < layers",
        ),
        (
            ["text.num_actors=2", "text.virtual_stages=2", "training.schedule=interleaved"],
            r"pipeline\(2\) × virtual_stages\(2\) = 4 > layers\(2\)",
        ),
    ],
)
def test_cuts_that_the_layers_do_not_admit(
    cut: list[str], told: str, tiny_assets: Path, made_model: str, tmp_path: Path
) -> None:
    own = (f"text.model_name={made_model}", f"vision.model_name={made_model}", f"run_dir={tmp_path / 'run'}")
    with pytest.raises(ConfigError, match=told):
        prepared("tiny", f"tiny_assets={tiny_assets}", *own, "text.parallelism=pipeline", *cut)


def test_the_entry_prints_it_and_leaves_nothing(tiny_assets: Path, tmp_path: Path) -> None:
    outcome = train(*tiny(tiny_assets, tmp_path / "run", "training.dry_run=true"))
    assert (outcome.status, outcome.left) == (0, ())
    assert outcome.stdout.startswith("dry run of tiny\n")
    assert outcome.stdout.endswith("every check passed; nothing was started\n")
    assert "checking the model" in outcome.stderr and "counting what it would take" in outcome.stderr
    assert not (tmp_path / "run").exists()
