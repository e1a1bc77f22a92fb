"""Rows of gpu_check on null CUDA: those that compare no digits are right."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.runs import LIMIT_S, ROOT
from tests.nullcuda.runs import environment

pytestmark = pytest.mark.nullcuda
ROWS = ("launches", "copies", "hand-over", "varied data", "8 samples, recompute mlp")


def test_rows_that_compare_no_digits_are_right(nullcuda: Path, tmp_path: Path) -> None:
    file, counts = tmp_path / "rows.jsonl", tmp_path / "counts"
    counts.mkdir()
    command = [sys.executable, "-m", "experiments.gpu_check", "--device", "cuda", "--out", str(file), "--patience", "3"]
    more = {name: str(tmp_path / name) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
    said = subprocess.run(
        [*command, "--only", *ROWS], capture_output=True, text=True, timeout=LIMIT_S, cwd=ROOT,
        env=environment(nullcuda, 1, counts, tmp_path / "accounts") | more,
    ).stderr  # fmt: skip
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    found = {row["row"]: row for row in rows if row["row"].startswith(ROWS)}
    assert len(found) >= len(ROWS) + 1 and all(row.get("ok") for row in found.values()), (rows, said[-3000:])
    graphs = found["varied data"]["graphs"]  # of layers at 1, 2, 4 and 3 samples: one each, whatever their length
    assert graphs[0][0] > 0 and graphs == [graphs[0]] * len(graphs)
