"""What a run expects: dry, planned, step by step."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dhp.config.command_line import compose_config
from dhp.config.schema import Config
from dhp.core.errors import DIED, ClusterError, ConfigError, DataError, Fault, PartFailed
from dhp.core.reports import DeviceInfo
from dhp.data.sample.sample import LENGTH_COLUMNS
from dhp.data.sampling.sampler import BatchLayout
from dhp.models.shape import PartShape
from dhp.plan.count.counted_model import Counted
from dhp.plan.count.state_bytes import RankBytes, rank_bytes
from dhp.plan.forecast.moments import shape_of
from dhp.plan.run_plan import attempt, plan_run
from dhp.trainer import ready
from dhp.trainer.dry_run import dry_run
from dhp.trainer.preflight import prepare
from dhp.trainer.ready import expected, look_ahead
from dhp.trainer.trainer import naming_step
from tests.data.sampling.test_sampler import Made, sampler
from tests.data.sampling.test_sampler import rows as rows_of
from tests.helpers.rows import slow
from tests.helpers.runs import tiny, train
from tests.plan.cut.test_partition import config_of
from tests.trainer.test_recomputing import SETTINGS, plan

VISION, TEXT, TEXT_RANK = 98_528, 127_552, 63_936  # parameters; tests/models/test_family.py adds them up


def prepared(name: str, *overrides: str) -> Config:
    return prepare(compose_config(name, overrides=["training.dry_run=true", *overrides]))


def test_bytes_of_each_rank_by_hand(tiny_assets: Path, made_model: str, tmp_path: Path) -> None:
    models = (f"vision.model_name={made_model}", f"text.model_name={made_model}")
    config = prepared(
        "tiny", f"tiny_assets={tiny_assets}", f"run_dir={tmp_path / 'run'}", "cluster.device=cpu", *models
    )
    graph = plan_run(config, made_model).graph
    plan = plan_run(config, made_model)
    shapes = {stage.name: shape_of(plan, stage) for stage in graph.stages}
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
    assert f"[{14 * VISION / 2**20:.1f} MiB]" in printed and f"[{16 * TEXT_RANK / 2**20:.1f} MiB]" in printed
    (fullest,) = (line for line in printed.splitlines() if line.startswith("fullest device"))
    (planned,) = (line for line in printed.splitlines() if line.startswith("planned "))
    assert fullest.split()[2:4] == planned.split()[1:3]  # one answer
    assert "8 samples = text.data 1 × micro_batch_size 4 × 2 micro-batches" in printed


@pytest.mark.slow
def test_a_dry_run_names_the_form_of_a_part_that_has_another(tmp_path: Path) -> None:
    asked = ("text.state_bytes=12", f"run_dir={tmp_path / 'run'}")
    printed = dry_run(prepared("qwen2_5_vl_32b", *asked))
    (line,) = (line for line in printed.splitlines() if line.startswith("text ") and "bfloat16" in line)
    assert "zero_stage 3, bfloat16, state_bytes 12 " in line
    assert line.split()[-6:] == ["0.0", "MiB", "7.6", "GiB", "15.3", "GiB"]  # 4 and 8 bytes of 32.8 B over 16 ranks
    (row,) = (line for line in printed.splitlines() if line.startswith("text ") and "[" in line)
    assert row.split()[1:] == ["366.2", "GiB", "-", "83.9", "GiB", "[22.9", "GiB]"]
    assert "of moments a" not in printed
    assert "written behind steps: 1.8 GiB a vision rank, 15.3 GiB a text rank at most" in printed  # 8 of these bytes
    elsewhere = dry_run(prepared("qwen2_5_vl_32b", *asked, "text.host_moments=true"))
    assert "\nhost memory    7.6 GiB of moments a text rank\n" in elsewhere  # 4 bytes of 32.8 B over 16 ranks


def fullest_of(printed: str) -> float:
    """GiB of the fullest device."""
    (line,) = (line for line in printed.splitlines() if line.startswith("fullest device"))
    return float(line.split()[2])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "device"), [("32b_8gpus", 69.4), ("72b_32gpus", 60.7)])
def test_large_models_on_fewer_devices_fit_with_a_row_of_16k(name: str, device: float, tmp_path: Path) -> None:
    run = f"run_dir={tmp_path / 'run'}"
    printed = dry_run(prepared(f"qwen2_5_vl_{name}", run))
    assert fullest_of(printed) == device and "planned        fits: " in printed
    # What enters each layer of half a row of 16,384 tokens, in 16 bits, beside the tower's.
    # By the fullest moment one layer of the larger model has gone back.
    layers, width = {"32b_8gpus": (64, 5120), "72b_32gpus": (80 - 1, 8192)}[name]
    (text,) = (line for line in printed.splitlines() if line.startswith("text rank "))
    assert f"activations {8192 * layers * 2 * width / 2**30:.1f} GiB" in text
    if name == "32b_8gpus":  # with all states in float32 it would not
        exact = dry_run(prepared(f"qwen2_5_vl_{name}", run, "text.state_bytes=18"))
        assert fullest_of(exact) == 84.6 and "planned        does not fit: 84.6 GiB" in exact


@pytest.mark.parametrize(("name", "device"), [slow("3b", 60.1), slow("7b", 59.6), ("32b", 59.0), slow("72b", 50.9)])
def test_each_ready_made_configuration_passes_without_a_download(name: str, device: float, tmp_path: Path) -> None:
    printed = dry_run(prepared(f"qwen2_5_vl_{name}", f"run_dir={tmp_path / 'run'}"))
    assert fullest_of(printed) == device and "planned        fits: " in printed
    assert "data.data_registry.train.annotation_path=" in printed
    assert printed.endswith("every check but these of the data passed; nothing was started")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "device"), [("7b_tensor", 63.0), ("32b_8gpus_tensor", 72.9)])
def test_the_layouts_beside_them_fit_and_choose_what_is_recomputed(name: str, device: float, tmp_path: Path) -> None:
    config = prepared(f"qwen2_5_vl_{name}", f"run_dir={tmp_path / 'run'}")
    assert (config.vision.recompute, config.text.recompute, config.cluster.collocate) == ("auto", "auto", True)
    printed = dry_run(config)
    assert fullest_of(printed) == device
    assert "planned        fits: " in printed and "of 75.1 GiB" in printed


@pytest.mark.slow
def test_rows_are_assumed_as_the_plan_makes_them_and_a_limit_that_none_reaches_is_named(tmp_path: Path) -> None:
    run = f"run_dir={tmp_path / 'run'}"
    printed = dry_run(prepared("qwen2_5_vl_3b", run, "data.limits.vision=null"))
    assert "rows hold 2,048 tokens in the mean, not data.limits.text=8192: data.limits.vision is null" in printed
    assert "Set data.limits.vision=8192" in printed and "micro-batches of 1 sample of 2,048 tokens" in printed
    whole = dry_run(prepared("qwen2_5_vl_3b", run))
    assert "rows hold" not in whole and "micro-batches of 4 samples of 2,048 tokens" in whole
    assert "a step         32 rows = text.data 4 × 8 micro-batches" in whole


def test_degrees_are_checked_against_the_shipped_shape() -> None:
    with pytest.raises(ConfigError, match="text.tensor=32 leaves actors without any .* 28 attention heads"):
        prepared("qwen2_5_vl_7b", "text=tensor", "text.num_actors=32", "text.tensor=32", "text.data=1")


def test_heads_that_ranks_do_not_divide_are_counted(nine_heads_model: str, tiny_assets: Path, tmp_path: Path) -> None:
    """Attention's four projections are whole on each rank."""
    models = [f"{part}.model_name={nine_heads_model}" for part in ("vision", "text")]
    run = (f"tiny_assets={tiny_assets}", f"run_dir={tmp_path / 'run'}")
    printed = dry_run(prepared("tiny", *run, *models, "text.num_actors=2", "text.tensor=2"))
    attention = 72 * 72 * 2 + 2 * 72 * 24 + 72 + 2 * 24  # with the biases of query, key and value
    norms = 2 * 72
    layer = attention + norms + 3 * 72 * 96 // 2
    whole = 2 * (attention + norms) + 72
    total = 2 * layer + 72 + 512 * 72 // 2 * 2
    assert f"{total:,}" in printed and f"{whole:,}" in printed


@pytest.mark.parametrize("norms", ["false", "true"])
@pytest.mark.parametrize("tensor", [2, 4])
def test_adapters_beside_projections_that_each_rank_holds(
    nine_heads_model: str, tiny_assets: Path, tmp_path: Path, tensor: int, norms: str
) -> None:
    models = [f"{part}.model_name={nine_heads_model}" for part in ("vision", "text")]
    run = (f"tiny_assets={tiny_assets}", f"run_dir={tmp_path / 'run'}")
    degrees = (f"text.num_actors={tensor}", f"text.tensor={tensor}", f"text.sequence_sharded_norms={norms}")
    printed = dry_run(prepared("tiny", *run, *models, *degrees, "text.lora.rank=2"))
    assert "activations" in printed and "asks for more than shapes" not in printed


def test_parts_on_devices_of_their_own(tiny_assets: Path, tmp_path: Path) -> None:
    overrides = (f"tiny_assets={tiny_assets}", f"run_dir={tmp_path / 'run'}", "cluster.collocate=false")
    printed = dry_run(prepared("tiny", *overrides))
    assert "devices        4: one rank each" in printed


@pytest.mark.slow
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
    assert "frozen" in tower and tower.split()[-4:] == ["0.0", "MiB", "0.0", "MiB"]
    assert "  text.0 . 0 1 .  0' 2  1' 3  2' .  3'" in printed
    assert "text cuts      exact, no cut is faster" in printed
    assert "assumed        micro-batches of 4 samples of 2,048 tokens" in printed
    (bubble,) = (line for line in printed.splitlines() if line.startswith("bubble  "))
    assert all(f"{stage} " in bubble for stage in ("vision", "text.0", "text.1"))
    (waiting,) = (line for line in printed.splitlines() if line.startswith("waiting "))
    assert "text.0" in waiting and "for text.1" in waiting
    ranks = [line for line in printed.splitlines() if line.split()[1:2] == ["rank"]]
    assert [line.split()[0] for line in ranks if "activations" in line] == ["text.0", "text.1"]  # the tower is frozen


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
        (["text.num_actors=2", "text.cuts=[2]"], r"text.cuts=\[2\] cannot cut the 2 layers of text: 0 < 2 < layers"),
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


GPU = DeviceInfo("cuda", "NVIDIA H100 80GB HBM3", "GPU 1", "float32", memory_bytes=80 << 30)
CPU = DeviceInfo("cpu", "cpu", "CPUs of here", "float32")


def lengths(text: int = 200) -> np.ndarray:
    columns = np.zeros(16, LENGTH_COLUMNS)
    columns["text"], columns["vision"], columns["patches"] = text, 64, 256
    columns["squares"], columns["pictures"], columns["targets"], columns["pairs"] = 256**2, 1, 32, text**2
    return columns


def session_of(model: str, columns: np.ndarray) -> Any:
    plan = plan_run(config_of(model))
    data = SimpleNamespace(ask=lambda *_, **__: columns)
    return SimpleNamespace(plan=plan, config=plan.config, data=data, node_devices=2, threads=1)


def ahead_of(session: Any, devices: list[DeviceInfo]) -> tuple[Any, list[str]]:
    return expected(look_ahead(session, devices))


def test_a_run_on_known_gpus_is_planned(made_model: str) -> None:
    beside, (line,) = ahead_of(session_of(made_model, lengths()), [GPU, GPU])
    assert beside.planned.step_s and beside.planned.step_s > 0
    assert set(beside.planned.memory_bytes) == {"vision", "text"}
    assert line.startswith("planned ") and line.endswith("(rates by data sheets)")


def test_what_is_not_known_is_not_planned(made_model: str) -> None:
    beside, lines = ahead_of(session_of(made_model, lengths()), [CPU, CPU])  # nothing was measured here
    assert beside.planned.step_s is None and not lines
    beside, lines = ahead_of(session_of(made_model, lengths(0)), [GPU])
    assert beside.planned.step_s is None and lines == ["not planned: no sample's length is known"]


def test_a_model_whose_trace_takes_minutes_is_left_to_the_plan(made_model: str, monkeypatch: Any) -> None:
    monkeypatch.setattr("dhp.plan.count.counted_model.AT_ONCE", 0)
    monkeypatch.setattr(Counted, "is_traced", lambda *_: False)
    monkeypatch.setattr(Counted, "keeps", lambda *_: pytest.fail("it was traced"))
    beside, (line,) = ahead_of(session_of(made_model, lengths()), [GPU])
    assert beside.planned.step_s is None and "python -m dhp plan" in line


def test_a_defect_of_the_forecast_does_not_end_a_run(made_model: str, monkeypatch: Any) -> None:
    def broken(asked: Any) -> Any:
        raise KeyError("layer")

    monkeypatch.setattr(ready, "forecast", broken)
    beside, lines = ahead_of(session_of(made_model, lengths()), [GPU])
    assert beside.planned.step_s is None and lines == ["not planned: KeyError: 'layer'"]
    assert attempt(lambda: 3) == 3


def balanced_loads(fullest_first: bool) -> list[dict[str, int]]:
    """Of each step of two balanced rows, image tokens of both, and tokens of the longer one. One sample is far longer
    than others, and another has far more pictures."""
    rng = np.random.default_rng(0)
    text = rng.integers(80, 120, 480)
    vision = text // 4
    text[300], text[400], vision[400] = 1000, 900, 900
    source = sampler(Made(vision, text), "isf", BatchLayout(1, 2, 4), fullest_first=fullest_first)
    found = []
    for step in range(source.steps(1) - 1):
        samples = [list(row) for row in rows_of(source.batch(step))]
        most = {"vision": sum(vision[row].sum() for row in samples), "text": max(text[row].sum() for row in samples)}
        found.append({part: int(tokens) for part, tokens in most.items()})
    return found


def test_a_plan_made_of_the_fullest_steps_is_never_exceeded(tiny_assets: Path, tmp_path: Path) -> None:
    """Where they come later, the budget is exceeded before more is recomputed."""
    too_much = "are more than the budget, so more is recomputed"
    uneven, planned = balanced_loads(False), balanced_loads(True)
    assert sorted(map(str, uneven)) == sorted(map(str, planned))  # the same steps
    late, _ = plan(tiny_assets, tmp_path / "late", 60, loads=uneven)
    early, parts = plan(tiny_assets, tmp_path / "early", 60, loads=planned)
    assert too_much in late and too_much not in early
    assert "does not fit" not in early and any(set(part.choices) != {"all"} for part in parts.values())


def test_a_dry_run_says_what_comes_first(tiny_assets: Path, tmp_path: Path) -> None:
    printed = [
        dry_run(
            prepare(compose_config("tiny", overrides=[*tiny(tiny_assets, tmp_path / "run")[1:], *SETTINGS, balance]))
        )
        for balance in ("data.balance=random", "data.balance=balanced")
    ]
    line = "data           the fullest steps come first (data.fullest_first)"
    assert [line in one.splitlines() for one in printed] == [False, True]


def test_a_part_that_failed_is_named_with_its_step() -> None:
    with pytest.raises(PartFailed) as caught, naming_step(11), naming_step(4):
        raise PartFailed("text rank 1 died", Fault(DIED, "text rank 1", "save", "10.0.0.6"))
    assert str(caught.value) == "step 5: text rank 1 died"
    assert caught.value.fault == Fault(DIED, "text rank 1", "save", "10.0.0.6", 5)


def test_the_end_of_ray_is_too() -> None:
    with pytest.raises(ClusterError, match=r"^step 5: Ray's raylet ended$") as caught, naming_step(4):
        raise ClusterError("Ray's raylet ended")
    assert caught.value.step == 5


def test_other_errors_pass_through() -> None:
    with pytest.raises(DataError, match="^no picture$"), naming_step(4):
        raise DataError("no picture")
