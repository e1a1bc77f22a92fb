"""Whole runs on null CUDA, and the row of results that each gives."""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dhp.config.command_line import compose_config
from dhp.config.parts import model_name
from dhp.core.process import say_nothing
from dhp.models.pretrained import config_source
from dhp.plan.forecast.moments import Moment
from dhp.plan.run_plan import plan_run
from dhp.plan.search.sample_source import measured_table
from dhp.plan.search.verdict import expect
from dhp.trainer.preflight import prepare
from tests.helpers.runs import LIMIT_S, ROOT
from tests.nullcuda.accounts import Account, read_accounts
from tests.nullcuda.counted_ranks import FOLDER
from tests.nullcuda.layouts import Layout
from tests.nullcuda.stand_ins import BIN, LIB, SITE

STEPS = 3
HANDOVER = "cluster/"  # where a rank hands over what it has computed, and opens what it is sent
MICRO_BATCH = ("forward", "backward")


@dataclass(frozen=True)
class Run:
    """printed: by the run. summary: its summary.json. settings: all of its command. accounts: of each process.
    ranks: by name, a line a step and a last one, as `counted_ranks` writes them."""

    printed: str
    summary: Mapping[str, Any]
    settings: tuple[str, ...]
    accounts: list[Account]
    ranks: Mapping[str, list[dict[str, Any]]]


def environment(folder: Path, gpus: int, counts: Path, accounts: Path) -> dict[str, str]:
    """Of processes on null CUDA."""
    here = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}  # which is this process's
    return here | {
        "LD_LIBRARY_PATH": str(folder / LIB),
        "PATH": f"{folder / BIN}:{os.environ['PATH']}",
        "PYTHONPATH": f"{folder / SITE}:{ROOT}",
        "NULLCUDA_ACCOUNTS": str(accounts),
        "NULLCUDA_DEVICES": str(gpus),
        FOLDER: str(counts),
    }


def run(folder: Path, work: Path, layout: Layout) -> Run:
    """A run of three steps. folder: the environment; work: a new directory."""
    counts, accounts, run_dir = work / "counts", work / "accounts", work / "run"
    counts.mkdir(parents=True)
    own = (
        f"tiny_assets={work / 'assets'}", f"training.max_steps={STEPS}", "cluster.device=cuda",
        *layout.settings, *(layout.model(work) if layout.model is not None else ()),
    )  # fmt: skip
    command = [sys.executable, "-m", "dhp.train_ray", "--config-name=tiny", f"run_dir={run_dir}", *own]
    if layout.nodes > 1:
        command = [sys.executable, "-m", "tests.nullcuda.over_nodes", str(layout.nodes), str(layout.gpus), *command]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT_S, cwd=ROOT,
        env=environment(folder, layout.gpus, counts, accounts),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    summary = json.loads((run_dir / "summary.json").read_text())
    ranks = {file.stem: [json.loads(line) for line in file.read_text().splitlines()] for file in counts.iterdir()}
    return Run(done.stdout + done.stderr, summary, own, list(read_accounts(accounts)), ranks)


def row_of(name: str, layout: Layout, ended: Run) -> dict[str, Any]:
    """What a run gives a file of results."""
    planned = plan(ended.settings)
    return {
        "layout": name, "gpus": layout.gpus * layout.nodes, "nodes": layout.nodes, "backend": layout.backend,
        "transport": layout.transport, "steps": ended.summary["steps"],
        "stages": {stage: _stage(stage, ended.ranks, planned) for stage in sorted({*map(_stage_of, ended.ranks)})},
    }  # fmt: skip


def _stage_of(rank: str) -> str:
    return rank.rpartition("-")[0]


def _stage(stage: str, ranks: Mapping[str, list[dict[str, Any]]], planned: Mapping[str, Moment]) -> dict[str, Any]:
    """Of the rank with most of each, in the steps behind the first, in which memory is taken and locked."""
    own = [lines for rank, lines in ranks.items() if _stage_of(rank) == stage]
    later = [line for lines in own for line in lines[1:-1]]
    last = [lines[-1] for lines in own]
    workspace = max(line["workspace_bytes"] for line in last)
    peak = max(line["peak_bytes"] for lines in own for line in lines[:-1]) - workspace
    tensors = sum(size for what, size in planned[stage].taken.items() if what != "contexts") if planned else None
    return {
        "ranks": len(own),
        "launches": max(map(launches, later)),
        "library_calls": max(sum(of["calls"] for of in line["phases"].values()) for line in later),
        "copies": max(sum(of["copies"] for of in line["phases"].values()) for line in later),
        "waits": dict(sorted(_most(line["places"] for line in later).items())),
        "graphs": max(line["graphs"] for lines in own for line in lines[:-1]),
        "peak_bytes": peak,
        "planned_bytes": None if tensors is None else round(tensors),
        "workspace_bytes": workspace,
        "left_bytes": max(line["left_bytes"] for line in last),
    }


def launches(line: Mapping[str, Any]) -> int:
    """Of kernels in a step."""
    return sum(int(of["launches"]) for of in line["phases"].values())


def _most(places: Iterable[Mapping[str, int]]) -> Counter[str]:
    found: Counter[str] = Counter()
    for of_step in places:
        found |= Counter(of_step)
    return found


def plan(settings: tuple[str, ...]) -> Mapping[str, Moment]:
    """By stage, the fullest moment that a dry run of the run's own samples says; none where it does not know."""
    config = prepare(compose_config("tiny", overrides=[*settings, "training.dry_run=true", "cluster.address=local"]))
    table = measured_table(config, say_nothing)
    found = expect(plan_run(config, config_source(model_name(config))), table).forecast
    return {} if found is None else {stage: memory.peak for stage, memory in found.memory.items()}
