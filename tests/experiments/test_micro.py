"""Each small question gives its row: both ways take the same samples to the same losses, ranks hold what they must."""

from functools import partial

import pytest
import torch

from experiments.micro import layers
from experiments.micro.layers import compare
from tests.helpers.tiny_families import save_family


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "save_model", lambda name, folder: str(save_family(name, folder)))


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
def test_a_row_has_both_times_and_how_far_the_losses_are() -> None:
    plain = {"kernels": ",".join(f"{kind}:plain" for kind in layers.KERNELS)}
    row, ours = layers.in_turn("qwen2_5_vl", 1, 1, "kernels", plain, {})
    assert row["ratio"] == pytest.approx(row["plain_step_s"] / row["kernels_step_s"], rel=0.2)
    served = {use.kind: use.kernel for one in ours.trainers.values() for use in one.describe_kernels()}
    assert {"norm": "written", "rotary": "written", "gate": "plain"}.items() <= served.items()
    assert row["deviation"] < 1e-5 and row["steps"] == 1


@pytest.mark.grid  # half a minute of a compiler
@pytest.mark.usefixtures("tiny")
def test_compiled_layers_have_the_same_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))  # graphs without kernels: seconds
    row, _ = layers.in_turn("llava_clip", 1, 1, "compiled", {}, {"compile": True})
    assert row["ratio"] == pytest.approx(row["plain_step_s"] / row["compiled_step_s"], rel=0.2)
    assert row["warm_up_s"] > 0 and row["steps"] == 1 and row["deviation"] < 1e-5


@pytest.mark.slow
def test_each_way_holds_half_of_the_experts_and_sends_what_it_must() -> None:
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 8}
    rows = {row["text"]: row for row in compare(1, 24, **sizes)}
    experts = 2 * 8 * 3 * 64 * 32 * 4 / 1e6
    held = [rows[name]["expert_mb"] for name in ("tensor 2", "expert 2", "data 2")]
    assert held == [round(experts / 2, 2), round(experts / 2, 2), round(experts, 2)]
    assert rows["tensor 2"]["step_ratio"] == 1
    assert rows["tensor 2"]["all_to_all_mb"] == rows["data 2"]["all_to_all_mb"] == 0 < rows["expert 2"]["all_to_all_mb"]
    # Replicas do not sum the experts that they share out.
    assert rows["data 2"]["all_reduce_mb"] - rows["expert 2"]["all_reduce_mb"] > 0.95 * experts
