"""What ranks hold of experts and send for them, by layout."""

from __future__ import annotations

from experiments.experts.__main__ import compare


def test_each_way_holds_half_of_the_experts_and_sends_what_it_must() -> None:
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 8}
    rows = {row["text"]: row for row in compare(1, 24, **sizes)}
    experts = 2 * 8 * 3 * 64 * 32 * 4 / 1e6
    assert [rows[name]["expert_mb"] for name in ("tensor 2", "expert 2", "data 2")] == [
        round(experts / 2, 2), round(experts / 2, 2), round(experts, 2),
    ]  # fmt: skip
    assert rows["tensor 2"]["step_ratio"] == 1
    assert rows["tensor 2"]["all_to_all_mb"] == rows["data 2"]["all_to_all_mb"] == 0 < rows["expert 2"]["all_to_all_mb"]
    # Replicas do not sum the experts that they share out.
    assert rows["data 2"]["all_reduce_mb"] - rows["expert 2"]["all_reduce_mb"] > 0.95 * experts
