"""The trainers of each stage on a CUDA device that is none: no operation on two devices, and where the host waits."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.fake_cuda.device import compile_guard
from tests.helpers.rows import slow_but
from tests.helpers.tiny import save_model, save_qwen3_vl_moe

Answers = dict[str, dict[str, Any]]


def both(*said: str) -> list[str]:
    """Of both parts."""
    return [f"{part}.{one}" for part in ("vision", "text") for one in said]


FLOAT32, LIGHT = both("dtype=float32"), both("recompute=light")
TENSOR = both("num_actors=2", "parallelism=tensor")
ULYSSES = both("num_actors=2", "parallelism=sequence", "ulysses=2")
FSDP = both("num_actors=2", "zero_engine=fsdp")

# Keys of the configuration, where there is not one rank of each part in bfloat16.
BOTH = {
    "float32": FLOAT32,
    "bfloat16": [],
    "float32, tensor 2": [*FLOAT32, *TENSOR],
    "bfloat16, tensor 2, light": [*TENSOR, *LIGHT],
    "float32, ulysses 2, light": [*FLOAT32, *ULYSSES, *LIGHT],
    "ring 2": both("num_actors=2", "parallelism=sequence", "ring=2"),
    "ring 2 x ulysses 2, light": [*both("num_actors=4", "parallelism=sequence", "ring=2", "ulysses=2"), *LIGHT],
    "row shared by 2": ["vision.num_actors=2", "text.num_actors=2", "text.parallelism=sequence", "text.ulysses=2"],
    "packed rows of 2 replicas": ["text.num_actors=2"],
    "fsdp, stage 2": [*FSDP, *both("zero_stage=2")],
    "fsdp, stage 3": [*FSDP, *both("zero_stage=3")],
    "12 bytes of states": both("state_bytes=12"),
    "fsdp, stage 3, 10 bytes of states": [*FSDP, *both("zero_stage=3", "state_bytes=10")],
    "moments in host memory": both("host_moments=true"),
    "offload, chunks": both("recompute=offload", "mlp_chunks=3"),
}
# Of these the text part alone is driven.
LORA = {"lora 16": ["text.lora.rank=16"]}
PIPELINE = {"pipeline 2, tied": ["text.num_actors=2", "text.pipeline=2"]}
EXPERTS = {
    "experts": [],
    "experts over 2 ranks, light": ["text.num_actors=2", "text.expert=2", "text.recompute=light"],
    "experts over 2 ranks, full": ["text.num_actors=2", "text.expert=2", "text.recompute=full"],
}
CASES = BOTH | LORA | PIPELINE | EXPERTS
QUICK = (
    *("bfloat16, tensor 2, light", "row shared by 2", "fsdp, stage 3"),
    *("lora 16", "experts over 2 ranks, light"),
)
TOWER_LAYERS, LAYERS, LAYERS_OF_EXPERTS = 2, 2, 2  # of experts: of three
OF_EACH_EXPERT = 48  # rows from each rank: 96 tokens visit 2 of 4


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A directory for each case. Weights are not read: its configuration is all that counts."""
    folder = tmp_path_factory.mktemp("models")
    made, tied = save_model(folder / "made"), save_model(folder / "tied", tied=True)
    experts = save_qwen3_vl_moe(folder / "experts", num_hidden_layers=LAYERS_OF_EXPERTS + 1)
    for model in (made, tied):
        _change(model / "config.json", depth=TOWER_LAYERS, fullatt_block_indexes=[1])
    named = {name: made for name in BOTH | LORA} | dict.fromkeys(PIPELINE, tied) | dict.fromkeys(EXPERTS, experts)
    return {name: str(named[name]) for name in CASES}


def _change(config: Path, **tower: Any) -> None:
    said = json.loads(config.read_text())
    said["vision_config"] |= tower
    config.write_text(json.dumps(said))


class Probed(Answers):
    """What each case did. The quick ones are tried all in one process, and so are the others: loading the guard and
    torch takes most of the time."""

    def __init__(self, library: Path, models: dict[str, str]):
        super().__init__()
        self._library, self._models = library, models

    def __missing__(self, case: str) -> dict[str, Any]:
        names = QUICK if case in QUICK else [name for name in CASES if name not in QUICK]
        self.update(probe(self._library, self._models, names))
        return self[case]


@pytest.fixture(scope="module")
def probed(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Answers:
    if shutil.which("g++") is None:
        pytest.skip("g++ is needed to compile the stub of a device; install a C++ compiler to run these tests")
    return Probed(compile_guard(tmp_path_factory.mktemp("guard")), models)


def probe(library: Path, models: dict[str, str], names: Sequence[str]) -> Answers:
    asked = [
        {
            "model": models[name],
            "keys": CASES[name],
            "parts": ["vision", "text"] if name in BOTH else ["text"],
            "read": OF_EACH_EXPERT,
        }
        for name in names
    ]
    command = [sys.executable, "-m", "tests.fake_cuda.probe", str(library), json.dumps(asked)]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    assert done.returncode == 0, done.stderr[-4000:]
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return dict(zip(names, answers, strict=True))


def waits(answer: dict[str, Any]) -> dict[str, dict[str, int]]:
    """Where the host waited in the phases of micro-batches."""
    return {phase: found for phase, found in answer["syncs"].items() if phase[-1].isdigit()}


@pytest.mark.parametrize("case", slow_but([name for name in CASES if "experts over" not in name], *QUICK[:-1]))
def test_the_host_waits_for_nothing_in_a_micro_batch_but_to_hand_over(case: str, probed: Answers) -> None:
    """The trainers never wait; handing over, which is the worker's, waits once a call that returns tensors."""
    assert waits(probed[case]) == {}
    assert {f"{stage} {way} 1" for stage in probed[case]["stages"] for way in ("forward", "backward")} <= set(
        probed[case]["kernels"]
    )


@pytest.mark.parametrize("case", slow_but([name for name in CASES if "experts over" in name], QUICK[-1]))
def test_experts_on_other_ranks_make_the_host_wait_once_a_layer_and_forward(case: str, probed: Answers) -> None:
    """For the sizes of the exchange; a recomputed layer, and backward, know them."""
    found = waits(probed[case])
    assert set(found) == {"text forward 0", "text forward 1"}
    for places in found.values():
        ((place, times),) = places.items()
        assert place.startswith("to host at parallel/expert/expert_shares.py:") and times == LAYERS_OF_EXPERTS


@pytest.mark.parametrize("case", slow_but(CASES, *QUICK))
def test_each_way_of_waiting_is_seen(case: str, probed: Answers) -> None:
    kinds = sorted(place.split(" at ")[0] for place in probed[case]["syncs"]["control"])
    assert kinds == ["bincount", "boolean index", "item", "nonzero", "to device", "to host", "to host"]


@pytest.mark.parametrize("case", slow_but(CASES, *QUICK))
def test_the_host_waits_for_the_norm_and_the_loss_once_a_step(case: str, probed: Answers) -> None:
    syncs, (*others, last) = probed[case]["syncs"], probed[case]["stages"]
    norms = {stage: sum(syncs.get(f"{stage} norm", {}).values()) for stage in (*others, last)}
    assert set(norms.values()) == {1}, syncs
    assert [sum(syncs.get(f"{stage} update", {}).values()) for stage in others] == [0] * len(others), syncs
    assert sum(syncs.get(f"{last} update", {}).values()) == 1, syncs


@pytest.mark.parametrize("case", slow_but(BOTH, *QUICK[:-2]))
def test_what_crosses_to_the_device_is_packed(case: str, probed: Answers) -> None:
    transfers, targets = probed[case]["transfers"], probed[case]["targets"]
    for m in (0, 1):
        assert transfers[f"vision forward {m}: to device"] == 2  # pixels, and all integers
        assert transfers[f"text forward {m}: to device"] == 2  # embeddings, and all integers
        layers = {"vision": TOWER_LAYERS, "text": LAYERS} if "offload" in case else {"vision": 0, "text": 0}
        assert transfers[f"vision backward {m}: to device"] == targets + layers["vision"]
        assert transfers.get(f"text backward {m}: to device", 0) == layers["text"]
