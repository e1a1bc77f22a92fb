"""The roofline's costs: bytes and operations of kernels that can be counted by hand, and a step's sums."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest

from experiments.roofline.__main__ import CHOICES
from experiments.roofline.device import Device, read_device
from tests.helpers.figures import ROOT

SAMPLES, TEXT_TOKENS = 2, 24
PATCHES, TOKENS = SAMPLES * 96, SAMPLES * (24 + TEXT_TOKENS)


@pytest.fixture(scope="module")
def told(made_model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `costs_by_hand` finds, and rows of the command with each choice of `--fused`."""
    if shutil.which("g++") is None:
        pytest.skip("g++ is needed to compile the stub of a device; install a C++ compiler to run these tests")
    out = tmp_path_factory.mktemp("roofline") / "rows.jsonl"
    command = [sys.executable, "-c", "from tests.experiments.test_roofline import count; count()", made_model, str(out)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-4000:]
    kernels = json.loads([line for line in done.stdout.splitlines() if line.startswith("{")][-1])
    return {"kernels": kernels, "rows": [json.loads(line) for line in out.read_text().splitlines()]}


def count() -> None:
    """In a process of its own: the command, then operations whose costs are known."""
    model, out = sys.argv[1:]
    sizes = ["--samples", str(SAMPLES), "--grid", "1", "8", "12", "--text-tokens", str(TEXT_TOKENS)]
    sys.argv[1:] = ["--shape", model, *sizes, "--fused", *CHOICES, "--device", "H100", "--out", out]
    from experiments.roofline.__main__ import main

    main()
    import torch
    import torch.nn.functional as F

    from experiments.fake_cuda.drive import fake_device
    from experiments.roofline.costs import Costs
    from experiments.roofline.fused import COMPILED, stand_ins

    costs = Costs(vocabulary=7)
    with fake_device(costs, stand_ins(costs, COMPILED)):
        one = {"device": "cuda", "dtype": torch.bfloat16}
        a, b, row = torch.empty(8, 16, **one), torch.empty(16, 7, **one), torch.empty(1, 16, **one)
        torch.mm(a, b)
        torch.add(a, a)
        torch.add(a, row.expand(8, 16))  # repeated, and read once
        a.mul_(2)
        a.copy_(torch.zeros_like(a))
        a.view(-1)[:4].t()  # nothing runs
        a.index_select(0, torch.ones(3, dtype=torch.long, device="cuda"))
        x, w = torch.empty(8, 16, **one, requires_grad=True), torch.empty(16, **one, requires_grad=True)
        F.rms_norm(x, (16,), w, 1e-6).backward(torch.empty(8, 16, **one))
    print(json.dumps({k.name: [k.kind, k.nbytes, k.flops, k.vocabulary] for k in reversed(costs.launched)}))


MATRIX, ROW = 8 * 16 * 2, 16 * 2  # bytes


@pytest.mark.parametrize(
    ("name", "cost"),
    {
        "mm": ["product", MATRIX + 16 * 7 * 2 + 8 * 7 * 2, 2 * 8 * 16 * 7, True],
        "add": ["elementwise", 3 * MATRIX, 0, False],
        "mul_": ["elementwise", 2 * MATRIX, 0, False],
        "copy_": ["elementwise", 2 * MATRIX, 0, False],
        "zeros_like": ["elementwise", MATRIX, 0, False],
        "index_select": ["elementwise", 3 * ROW + 3 * 8 + 3 * ROW, 0, False],
        "norm": ["elementwise", MATRIX + ROW + MATRIX, 0, False],
        "norm backward": ["elementwise", 2 * MATRIX + ROW + MATRIX + ROW, 0, False],
    }.items(),
)
def test_a_kernel_moves_its_operands(name: str, cost: list[Any], told: dict[str, Any]) -> None:
    assert told["kernels"][name] == cost


def test_what_has_no_kernel_costs_nothing(told: dict[str, Any]) -> None:
    assert set(told["kernels"]) == {
        "mm", "add", "mul_", "copy_", "zeros_like", "ones", "index_select", "norm", "norm backward"
    }  # fmt: skip


def chosen(told: dict[str, Any], fused: str, **wanted: Any) -> list[dict[str, Any]]:
    """Rows of a choice."""
    return [row for row in told["rows"] if row["fused"] == fused and all(row.get(k) == v for k, v in wanted.items())]


def test_a_decoders_products_are_those_of_its_matrices(told: dict[str, Any]) -> None:
    """2 layers of width 64 with 4 of 8 heads for keys, an MLP of 96, and a head of 512 for the targets, whose gradients
    are computed with the loss."""
    layer = 64 * (64 + 32 + 32 + 64) + 3 * 64 * 96
    head, targets = 64 * 512, SAMPLES * TEXT_TOKENS // 2
    forward = 2 * TOKENS * 2 * layer + 3 * 2 * targets * head
    (row,) = chosen(told, "compiled", phase="text forward 0")
    assert row["product_flops"] == forward
    (row,) = chosen(told, "compiled", phase="text backward 0")
    assert row["product_flops"] == 2 * 2 * TOKENS * 2 * layer


@pytest.mark.parametrize("fused", CHOICES)
def test_a_step_is_the_sum_of_its_phases(fused: str, told: dict[str, Any]) -> None:
    *phases, step = chosen(told, fused)
    assert step["phase"] == "step" and (step["patches"], step["tokens"]) == (PATCHES, TOKENS)
    assert step["ms"] == pytest.approx(sum(row["ms"] for row in phases), abs=0.01)
    passes = sum(row["ms"] for row in phases if row["phase"].endswith(" 0"))
    assert step["passes_ms"] == pytest.approx(passes, abs=0.01) and passes < step["ms"]
    assert step["elementwise_bytes"] == sum(row["elementwise_bytes"] for row in phases)
    device = read_device("H100")
    assert step["mfu"] == pytest.approx(step["useful_flops"] / (passes * 1e9) / device.peak_tflop_s, abs=1e-4)
    for row in phases:
        if "assumed" not in row:
            kinds = ("product", "attention", "elementwise", "collective", "vocabulary")
            assert row["ms"] == pytest.approx(sum(row[f"{kind}_ms"] for kind in kinds), abs=0.01)
            assert row["ms"] >= 0.99 * row["kernels"] * device.launch_us * 1e-3


def test_fused_kernels_move_less_and_nothing_else_changes(told: dict[str, Any]) -> None:
    steps = {fused: chosen(told, fused, phase="step")[0] for fused in CHOICES}
    moved = [steps[fused]["elementwise_bytes"] for fused in CHOICES if fused != "written"]
    assert (
        moved == sorted(moved, reverse=True)
        and len(set(moved)) == 4
        and moved[-1] < steps["written"]["elementwise_bytes"] < moved[0]
    )
    assert len({step["counted_flops"] for step in steps.values()}) == 1
    assumed = Counter(row["assumed"] for row in chosen(told, "all") if "assumed" in row)
    assert assumed == dict.fromkeys(("add + norm", "add + norm backward"), 2)
    assert not [row for row in chosen(told, "compiled") if "assumed" in row]


def test_a_norm_behind_a_sum_spares_one_reading_and_a_gradient(told: dict[str, Any]) -> None:
    """Of 5 norms of the decoder all but the first come behind a sum of [tokens, 64] in 16 bits."""
    states = TOKENS * 64 * 2
    (forward,) = chosen(told, "all", phase="text forward 0", assumed="add + norm")
    (backward,) = chosen(told, "all", phase="text backward 0", assumed="add + norm backward")
    assert (forward["elementwise_bytes"], backward["elementwise_bytes"]) == (-4 * states, -8 * states)


def test_a_kernel_takes_the_longest_of_its_bytes_its_operations_and_a_launch() -> None:
    device = Device(2.0, 500.0, 250.0, 3.0, 1000.0)
    assert device.seconds("elementwise", 8_000_000_000, 0) == pytest.approx(4e-3)
    assert device.seconds("product", 8, 10**12) == pytest.approx(2e-3)
    assert device.seconds("attention", 8, 10**12) == pytest.approx(4e-3)
    assert device.seconds("elementwise", 8, 0) == pytest.approx(3e-6)


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(KeyError, match="H100, H200; write the device into it"):
        read_device("abacus")
