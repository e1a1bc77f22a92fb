"""Both trainers on a CUDA device that is none: no two devices in one operation, and how often the host waits."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fake_cuda.device import compile_guard

CASES: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32", "recompute": "none"},
    "bfloat16": {"dtype": "bfloat16", "recompute": "none"},
    "float32, light": {"dtype": "float32", "recompute": "light"},
    "bfloat16, light": {"dtype": "bfloat16", "recompute": "light"},
    "float32, tensor 2": {"dtype": "float32", "recompute": "none", "tensor": 2},
    "bfloat16, tensor 2, light": {"dtype": "bfloat16", "recompute": "light", "tensor": 2},
    "float32, ulysses 2": {"dtype": "float32", "recompute": "none", "ulysses": 2},
    "bfloat16, ulysses 2, light": {"dtype": "bfloat16", "recompute": "light", "ulysses": 2},
    "bfloat16, row shared by 2": {"dtype": "bfloat16", "recompute": "none", "shared": 2},
    "bfloat16, offload, chunks": {"dtype": "bfloat16", "recompute": "offload", "mlp_chunks": 3},
}


@pytest.fixture(scope="module")
def probed(made_model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What each case did, all in one process: loading the guard and torch takes most of the time."""
    if shutil.which("g++") is None:
        pytest.skip("g++ is needed to compile the stub of a device; install a C++ compiler to run these tests")
    library = compile_guard(tmp_path_factory.mktemp("guard"))
    arguments = [str(library), made_model, json.dumps(list(CASES.values()))]
    command = [sys.executable, "-m", "tests.fake_cuda.probe", *arguments]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    assert done.returncode == 0, done.stderr[-4000:]
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return dict(zip(CASES, answers, strict=True))


@pytest.mark.parametrize("case", CASES)
def test_the_host_waits_for_nothing_in_a_micro_batch_but_to_hand_over(case: str, probed: dict[str, Any]) -> None:
    """The trainers never wait; handing over, which is the worker's, waits once a call that returns tensors."""
    assert not {phase: found for phase, found in probed[case]["syncs"].items() if phase[-1].isdigit()}


def test_each_way_of_waiting_is_seen(probed: dict[str, Any]) -> None:
    for answer in probed.values():
        kinds = sorted(place.split(" at ")[0] for place in answer["syncs"]["control"])
        assert kinds == ["boolean index", "item", "to device", "to host"]


@pytest.mark.parametrize("case", CASES)
def test_the_host_waits_for_the_norm_and_the_loss_once_a_step(case: str, probed: dict[str, Any]) -> None:
    syncs = probed[case]["syncs"]
    assert [sum(syncs.get(f"{part} norm", {}).values()) for part in ("vision", "text")] == [1, 1], syncs
    assert sum(syncs.get("vision update", {}).values()) == 0, syncs
    assert sum(syncs.get("text update", {}).values()) == 1, syncs


@pytest.mark.parametrize("case", CASES)
def test_what_crosses_to_the_device_is_packed(case: str, probed: dict[str, Any]) -> None:
    transfers = probed[case]["transfers"]
    for m in (0, 1):
        assert transfers[f"vision forward {m}: to device"] == 2  # pixels, and all integers
        assert transfers[f"text forward {m}: to device"] == 2  # embeddings, and all integers
        layers = {"vision": 4, "text": 2} if "offload" in case else {"vision": 0, "text": 0}
        assert transfers[f"vision backward {m}: to device"] == 1 + layers["vision"]
        assert transfers.get(f"text backward {m}: to device", 0) == layers["text"]
