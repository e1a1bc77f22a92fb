"""A dry run: numbers held against hand-computed ones, every ready-made configuration, and nothing left behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from dhp.base.errors import ConfigError
from dhp.config.load import compose_config
from dhp.config.schema import Config, PartConfig
from dhp.models.shape import PartShape
from dhp.run.dry_run import dry_run, part_shapes
from dhp.run.footprint import RankBytes, by_stage, gathered_bytes, rank_bytes, runtime_bytes
from dhp.run.preflight import prepare
from tests.helpers.runs import tiny, train

VISION, TEXT, TEXT_RANK = 98_528, 127_552, 63_936  # parameters; tests/models/test_shape.py adds them up


def prepared(name: str, *overrides: str) -> Config:
    return prepare(compose_config(name, overrides=["training.dry_run=true", *overrides]))


def test_bytes_of_each_rank_by_hand(tiny_assets: Path, made_model: str, tmp_path: Path) -> None:
    models = (f"vision.model_name={made_model}", f"text.model_name={made_model}")
    config = prepared(
        "tiny", f"tiny_assets={tiny_assets}", f"run_dir={tmp_path / 'run'}", "cluster.device=cpu", *models
    )
    shapes = part_shapes(config, made_model)
    assert shapes == {"vision": PartShape(VISION, VISION, VISION), "text": PartShape(TEXT, TEXT_RANK, 320)}
    vision, text = (rank_bytes(getattr(config, part), shapes[part]) for part in ("vision", "text"))
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
    assert f"fullest device {(states + loss) / 1e6:.3f} MB; activations not included" in printed
    assert "[1.379 MB]" in printed and "[1.023 MB]" in printed  # the chosen stage of each part
    assert "8 samples = text.data 1 × micro_batch_size 4 × 2 micro-batches" in printed


@pytest.mark.parametrize(
    ("dtype", "stage", "expected"),
    [
        ("float32", 0, (400, 400, 800)),
        ("float32", 1, (400, 400, 300)),
        ("float32", 2, (400, 100, 300)),
        ("float32", 3, (100, 100, 200)),  # a rank's share of the weights is what the optimizer updates
        ("bfloat16", 0, (200, 400, 1200)),
        ("bfloat16", 1, (200, 400, 300)),
        ("bfloat16", 2, (200, 100, 300)),
        ("bfloat16", 3, (50, 100, 300)),
    ],
)
def test_what_each_zero_stage_cuts(dtype: str, stage: int, expected: tuple[int, int, int]) -> None:
    part = PartConfig(num_actors=4, tensor=1, dtype=dtype, zero_stage=stage)
    assert rank_bytes(part, PartShape(100, 100, 100)) == RankBytes(*expected)


def test_torch_keeps_a_share_of_the_weights_in_the_optimizers_format_alone() -> None:
    part = PartConfig(num_actors=8, tensor=2, data=4, dtype="bfloat16", zero_stage=3, zero_engine="fsdp")
    assert rank_bytes(part, PartShape(200, 100, 0)) == RankBytes(0, 100, 300)  # 16 bytes of each of 25 elements
    assert gathered_bytes(part, PartShape(200, 100, 0), 10, None) == 2 * 10 * 2 + 10 * 2 + 10 * 4


def test_every_stage_is_told_and_stage_1_of_slices_has_no_engine() -> None:
    part = PartConfig(num_actors=8, tensor=2, data=4, ulysses=1, ring=1, dtype="bfloat16", zero_stage=3)
    assert by_stage(part, PartShape(200, 100, 0)) == {0: 1800, 1: None, 2: 600, 3: 400}
    assert runtime_bytes(part) > runtime_bytes(PartConfig(data=1, ulysses=1, ring=1, tensor=1))


def test_a_float64_value_takes_eight_bytes_and_an_unknown_format_is_refused() -> None:
    part = PartConfig(num_actors=1, tensor=1, dtype="float64")
    assert rank_bytes(part, PartShape(10, 10, 10)) == RankBytes(80, 80, 160)
    with pytest.raises(ConfigError, match="dtype=int3"):
        rank_bytes(PartConfig(dtype="int3"), PartShape(10, 10, 10))


@pytest.mark.parametrize(
    ("name", "device"), [("3b", "42.3 GB"), ("7b", "47.5 GB"), ("32b", "43.3 GB"), ("72b", "29.5 GB")]
)
def test_each_ready_made_configuration_passes_without_a_download(name: str, device: str, tmp_path: Path) -> None:
    printed = dry_run(prepared(f"qwen2_5_vl_{name}", f"run_dir={tmp_path / 'run'}"))
    assert f"fullest device {device}; activations not included" in printed
    assert float(device.split()[0]) <= 50.0  # of 80, so that activations have the rest
    assert "data.data_registry.train.annotation_path=" in printed
    assert printed.endswith("every check but these of the data passed; nothing was started")


def test_degrees_are_checked_against_the_shipped_shape() -> None:
    with pytest.raises(ConfigError, match=r"heads\(28\) % tensor\(8\)"):
        prepared("qwen2_5_vl_7b", "text=tensor", "text.zero_stage=0", "text.data=1")


def test_parts_on_devices_of_their_own(tiny_assets: Path, tmp_path: Path) -> None:
    overrides = (f"tiny_assets={tiny_assets}", f"run_dir={tmp_path / 'run'}", "cluster.collocate=false")
    printed = dry_run(prepared("tiny", *overrides))
    assert "devices        4: one rank each" in printed


def test_the_entry_prints_it_and_leaves_nothing(tiny_assets: Path, tmp_path: Path) -> None:
    outcome = train(*tiny(tiny_assets, tmp_path / "run", "training.dry_run=true"))
    assert (outcome.status, outcome.left) == (0, ())
    assert outcome.stdout.startswith("dry run of tiny\n")
    assert outcome.stdout.endswith("every check passed; nothing was started\n")
    assert not (tmp_path / "run").exists()
