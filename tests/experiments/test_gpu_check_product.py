"""The check's first rows: dhp as a user runs it. On a CPU they are what the check holds a GPU's digits to."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.gpu_check import product
from experiments.gpu_check.__main__ import Results, check_sections, choose
from experiments.gpu_check.product import LOSSES, TOLERANCE
from experiments.gpu_check.setting import NotHere, Setting


def test_digits_are_compared_step_by_step() -> None:
    steps = [{"step": number + 1, "loss": loss} for number, loss in enumerate(LOSSES)]
    found = product._compared(steps)
    assert found["ok"] and found["loss_error"] == 0 and found["losses"][3] == 5.0613
    assert not product._compared(steps[:7])["ok"]  # a run that ended early
    resumed = steps[6:] + [steps[0] | {"loss": LOSSES[0] + 2 * TOLERANCE}]
    assert not product._compared([*steps, *resumed])["ok"]


def test_without_ray_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product, "find_spec", lambda name: None if name == "ray" else name)
    with pytest.raises(NotHere, match="ray is not installed \\(scripts/gpu_bundle.sh packs what is missing\\)"):
        product.start(Setting("cpu", tmp_path), "any", ())


def test_ratios_are_of_the_rows_before(tmp_path: Path) -> None:
    setting = Setting("cpu", tmp_path)
    product._keep(setting, by_ray=660.0)
    assert product._beside(setting, "engines", 600.0) == {"by_ray_to_engines": 1.1}
    assert product._beside(setting, "plain", 800.0) == {"by_ray_to_plain": 0.825, "engines_to_plain": 0.75}


@pytest.mark.slow
def test_each_process_of_a_run_has_what_an_older_torch_lacks() -> None:
    """By the time that dhp asks for it, and not in processes that have no need of torch."""
    older = "import sys; print('torch' in sys.modules); from torch.nn.attention import varlen as v; del v.varlen_attn;"
    told = f"{older} from dhp.parallel.attention import attention_kernels as k; print(k.varlen_attn.__module__)"
    paths = {"PYTHONPATH": os.pathsep.join(map(str, (product.FIRST_IN_EACH, product.ROOT)))}
    done = subprocess.run([sys.executable, "-c", told], env=os.environ | paths, capture_output=True, text=True)
    assert done.stdout.split() == ["False", "experiments.gpu_check.stand_ins"], done.stderr


@pytest.mark.slow
def test_a_cpu_gives_the_digits_that_are_kept(tmp_path: Path) -> None:
    """In two layouts, behind a kill too; and the rows of the model with real layers run, tiny."""
    out = tmp_path / "gpu.jsonl"
    assert check_sections(choose(["product"], None), "cpu", Results(out), 3600.0) == 0, out.read_text()
    rows = {row["row"]: row for row in map(json.loads, out.read_text().splitlines())}
    assert rows["tiny 1+1"]["losses"] == [round(loss, 4) for loss in LOSSES]
    assert len(rows["tiny 2+2, killed"]["losses"]) < len(LOSSES) == len(rows["tiny resumed as 1+1"]["losses"])
    assert rows["tiny resumed as 1+1"]["resumed_from"] in ("step_6", "step_9")
    assert {"by_ray_to_plain", "engines_to_plain"} <= set(rows["3B, plain transformers"])
    assert rows["3B, recompute=auto"]["peak_bytes"] > 0
