"""A run through the real entry with vision on one node and text on the other: the same training as on one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.runs import FIRST, Outcome, tiny, train
from tests.nodes.conftest import ADDRESSES

FIELDS = ("loss", "grad_norm", "tokens", "lr")


def lines(run_dir: Path) -> list[list[object]]:
    told = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [[line[field] for field in FIELDS] for line in told]


@pytest.mark.slow
def test_two_nodes_train_what_one_does(
    first_run: tuple[Path, Outcome], two_nodes: str, tiny_assets: Path, tmp_path: Path
) -> None:
    one, two = first_run[0], tmp_path / "two"
    apart = ["cluster.collocate=false", f"cluster.address={two_nodes}", "data.num_workers=2"]
    outcome = train(*tiny(tiny_assets, two, *FIRST, *apart))
    assert outcome.status == 0, outcome.stderr
    first, second = ADDRESSES
    assert f"on nodes {first} (vision 0-1), {second} (text 0-1)" in outcome.stdout
    assert "lie across nodes" not in outcome.stderr
    assert f"data workers run on {first}, {second}" in outcome.stdout
    for rank in (0, 1):
        assert (two / "logs" / f"vision-{rank}.log").read_text().startswith(f"vision rank {rank} on {first}; ")
        assert (two / "logs" / f"text-{rank}.log").read_text().startswith(f"text rank {rank} on {second}; ")
    assert [path.name for path in (two / "checkpoints").iterdir()] == ["step_3"]
    assert first_run[1].status == 0, first_run[1].stderr
    assert lines(two) == lines(one)
    summary = json.loads((two / "summary.json").read_text())
    assert summary["status"] == "completed"
