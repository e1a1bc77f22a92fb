"""Qwen2.5-VL 3B at full depth on null CUDA: peaks beside the dry run's, launches of a micro-batch by cause."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dhp.config.command_line import compose_config
from dhp.config.parts import model_name
from dhp.data.sample.sample import LENGTH_COLUMNS
from dhp.data.sampling.step_loads import Table
from dhp.models.pretrained import config_source
from dhp.plan.forecast.moments import StageMemory
from dhp.plan.run_plan import plan_run
from dhp.plan.search.verdict import expect
from dhp.trainer.preflight import prepare
from tests.helpers.figures import rows
from tests.helpers.runs import LIMIT_S, ROOT
from tests.nullcuda.conftest import Keep
from tests.nullcuda.runs import environment

pytestmark = pytest.mark.nullcuda

# Of a sample, as experiments.gpu_check makes them: all, those of its picture, learned ones.
TOKENS, FEATURES, TARGETS = 1524, 1224, 150
PLAIN, KERNELS, LAYERS = "nothing", "kernels", "layers"  # what is compiled
# Part, bytes of states a parameter, what is compiled; and samples with what is recomputed.
CASES: tuple[tuple[str, int, str, tuple[str, ...]], ...] = tuple(
    (part, *case)
    for part in ("vision", "text")
    for case in (
        (18, PLAIN, ("1,none", "4,none", "4,light", "4,full")),
        (10, PLAIN, ("4,light",)),
        (18, KERNELS, ("4,none", "4,light")),
        (10, KERNELS, ("4,light",)),
        (18, LAYERS, ("4,none",)),
    )
)
NEAR = 0.01  # relative: of the dry run's bytes and those of torch's allocator


@pytest.mark.parametrize("part, state_bytes, compiled, cases", CASES, ids=[f"{a}, {b}, {c}" for a, b, c, _ in CASES])
def test_full_depth(
    part: str, state_bytes: int, compiled: str, cases: tuple[str, ...], nullcuda: Path, tmp_path: Path, keep_row: Keep
) -> None:
    found = list(measured(nullcuda, tmp_path, part, state_bytes, compiled, cases))
    for row in found:
        keep_row(row)
    for row in found:
        assert row["waits"] == 0 and row["left_bytes"] == 0
        assert abs(row["between_steps_bytes"] / row["planned_states_bytes"] - 1) < NEAR, row
        # Gates are plain for a dry run, which keep one activation more, unless compiled ones are asked for by name.
        assert compiled == LAYERS or abs(row["peak_bytes"] / row["planned_peak_bytes"] - 1) < NEAR, row
        for known in rows("nullcuda", **{name: row[name] for name in ASKED}):
            assert row["launches"] <= known["launches"] and row["update_launches"] <= known["update_launches"]


ASKED = ("part", "state_bytes", "compiled", "samples", "recompute")


def measured(
    folder: Path, work: Path, part: str, state_bytes: int, compiled: str, cases: tuple[str, ...]
) -> Iterator[dict[str, Any]]:
    """A row for each case. Bytes are those of tensors: workspaces of cuBLAS are apart."""
    command = [sys.executable, "-m", "tests.nullcuda.full_depth", part, str(state_bytes), compiled, *cases]
    more = {
        "NULLCUDA_COMPILES": "1" * (compiled != PLAIN), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(work / "inductor"), "TRITON_CACHE_DIR": str(work / "triton"),
    }  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT_S, cwd=ROOT,
        env=environment(folder, 1, work, work / "accounts") | more,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-6000:]
    for line in done.stdout.splitlines():
        row = json.loads(line)
        planned = plan(part, state_bytes, row["samples"], row["recompute"], compiled)
        for name in ("built_bytes", "peak_bytes", "before_update_bytes", "between_steps_bytes"):
            row[name] -= row["workspace_bytes"] if name != "built_bytes" else 0
        yield {
            "model": "Qwen2.5-VL 3B", "part": part, "state_bytes": state_bytes, "compiled": compiled, **row,
            "planned_states_bytes": planned.states.weights + planned.states.optimizer,
            "planned_peak_bytes": round(sum(size for what, size in planned.peak.taken.items() if what != "contexts")),
        }  # fmt: skip


def plan(part: str, state_bytes: int, samples: int, recompute: str, compiled: str) -> StageMemory:
    """What a dry run says of one rank of the part, with all samples of a micro-batch in one row."""
    parts = ("vision", "text")
    own = [
        *(f"{one}.{said}" for one in parts for said in ("parallelism=none", "num_actors=1", "zero_stage=0")),
        *(f"{one}.{said}" for one in parts for said in (f"recompute={recompute}", f"state_bytes={state_bytes}")),
        *(f"{one}.kernels=gate:compiled" for one in parts if compiled == KERNELS),
        f"data.limits.text={samples * TOKENS}", f"data.limits.vision={samples * FEATURES}", "training.batch_size=1",
        "training.micro_batch_size=1", "training.dry_run=true", "cluster.device=cuda",
    ]  # fmt: skip
    config = prepare(compose_config("qwen2_5_vl_3b", overrides=own))
    lengths = np.zeros(16 * samples, LENGTH_COLUMNS)
    lengths["text"], lengths["vision"], lengths["patches"], lengths["targets"] = TOKENS, FEATURES, 4 * FEATURES, TARGETS
    lengths["pairs"] = TOKENS**2
    found = expect(plan_run(config, config_source(model_name(config))), Table(lengths)).forecast
    assert found is not None
    return found.memory[part]
