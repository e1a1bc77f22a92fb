"""The check of a GPU, tried on the CPU: its rows are written one by one, and one that fails ends none of the others."""

import inspect
import json
import math
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import varlen

from dhp.cluster import host
from dhp.parallel import traffic
from dhp.parallel.attention import attention_kernels as kernels
from experiments.gpu_check import full_depth, pair, parity, probe, stand_ins
from experiments.gpu_check.__main__ import (
    LIMIT_S,
    NO_DEVICE,
    PATIENCE,
    WRONG,
    Results,
    check_sections,
    choose,
    last_run,
    main,
)
from experiments.gpu_check.parity import Trained, read_layout
from experiments.gpu_check.rows import CALLS, IN_ONE_PROCESS, LAYOUTS, PARITY, SECTIONS, Row, Section
from experiments.gpu_check.setting import Setting
from experiments.gpu_check.workshop import Workshop
from tests.helpers.rows import slow

ROOT = Path(__file__).parents[2]
PLANTED = "tests.experiments.planted_rows"


def is_running(pid: int) -> bool:
    """A process that nobody waited for counts as gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def check_rows(rows: list[Row], out: Path, limit_s: float = 600.0) -> int:
    """As one section."""
    return check_sections([Section("planted", 600.0, tuple(rows))], "cpu", Results(out), limit_s)


def read(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text().splitlines()]


@pytest.mark.slow
def test_a_row_that_fails_is_told_and_ends_no_other(tmp_path: Path) -> None:
    planted = {name: Row(name, PLANTED, name) for name in ("raising", "dying", "hanging", "deviating")}
    absent = Row("absent", "experiments.gpu_check.no_such_module")
    rows = [planted["raising"], absent, planted["dying"], planted["deviating"]]
    out = tmp_path / "gpu.jsonl"
    out.write_text('{"row": "of an earlier run"}\n')
    assert check_rows(rows, out) == WRONG
    kept, raised, missing, died, deviates, totals, _ = read(out)
    assert raised["section"] == "planted"
    assert kept == {"row": "of an earlier run"}
    assert raised["error"] == "ValueError: planted"
    assert raised["at"].startswith(str(Path(__file__).with_name("planted_rows.py")))
    assert raised["seconds"] > 0
    assert missing["error"].startswith("ModuleNotFoundError: ")
    assert died["error"].startswith("the process ended with status 7; ")
    assert deviates["error_of_loss"] == 1.0
    assert totals["failed"] == ["planted: raising", "planted: absent", "planted: dying"]
    assert totals["deviating"] == ["planted: deviating"]
    assert (totals["right"], totals["status"]) == (0, WRONG)


def test_what_cannot_be_imported_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the first row, with what is here and what is wanted; no other row is tried."""
    monkeypatch.setattr(probe, "USED", ("json", "no_such_module"))
    found = probe.check_machine(Setting("cpu", tmp_path))
    assert found["serves"] is False
    wanted = (
        f"dhp cannot be imported: torch {torch.__version__.partition('+')[0]}\\S* is here, \\S+ is wanted, transformers"
    )
    assert re.match(wanted, found["error"]) and "No module named 'no_such_module'" in found["error"]
    out = tmp_path / "gpu.jsonl"
    assert check_rows([Row("lacking", PLANTED, "lacking"), Row("who", PLANTED, "who")], out) == WRONG
    assert [row["row"] for row in read(out)] == ["lacking", "totals", "unanswered"]


@pytest.mark.slow
def test_a_row_that_lacks_a_module_costs_no_process(tmp_path: Path) -> None:
    workshop = Workshop("cpu", tmp_path)
    try:
        first = workshop.run(Row("who", PLANTED, "who"), 60.0)["pid"]
        assert workshop.run(Row("absent", "experiments.gpu_check.no_such_module"), 60.0)["error"]
        assert workshop.run(Row("who", PLANTED, "who"), 60.0)["pid"] == first
        assert workshop.run(Row("raising", PLANTED, "raising"), 60.0)["error"]
        assert workshop.run(Row("who", PLANTED, "who"), 60.0)["pid"] != first
    finally:
        workshop.close()


@pytest.mark.parametrize("by", [slow(signal.SIGTERM), signal.SIGKILL])
def test_ended_from_outside_it_leaves_no_process(by: signal.Signals, tmp_path: Path) -> None:
    """SIGTERM is what `timeout` sends."""
    program = (
        "import sys; from experiments.gpu_check import __main__ as check;"
        "from experiments.gpu_check.rows import Row, Section;"
        f"row = Row('telling', {PLANTED!r}, 'telling', ({str(tmp_path / 'pid')!r},));"
        "check.SECTIONS = (Section('planted', 60.0, (row,)),);"
        f"sys.argv[1:] = ['--device', 'cpu', '--out', {str(tmp_path / 'gpu.jsonl')!r}]; check.main()"
    )
    running = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT)
    while not (tmp_path / "pid").exists():
        assert running.poll() is None
        time.sleep(0.05)
    row = int((tmp_path / "pid").read_text())
    running.send_signal(by)
    running.wait()
    while is_running(row):  # the kernel takes a moment; the test's own limit is the end of it
        time.sleep(0.05)


def test_a_row_that_hangs_is_ended(tmp_path: Path) -> None:
    out = tmp_path / "gpu.jsonl"
    rows = [Row("hanging", PLANTED, "hanging"), Row("who", PLANTED, "who")]
    assert check_rows(rows, out, limit_s=0.5) == WRONG
    hung, late, totals, _ = read(out)
    assert hung["error"].startswith("TimeoutError: ")
    assert late["no time"]
    assert totals["no time"] == ["planted: who"]


@pytest.mark.slow
def test_a_section_without_time_takes_none_of_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PATIENCE, "cpu", 1.0)
    who = Row("who", PLANTED, "who")
    sections = [Section("short", 0.2, (Row("hanging", PLANTED, "hanging"), who)), Section("next", 600.0, (who,))]
    out = tmp_path / "gpu.jsonl"
    assert check_sections(sections, "cpu", Results(out), 600.0) == WRONG
    hung, late, after, *_ = read(out)
    assert "error" in hung and late["no time"] and after["ok"]


@pytest.mark.slow
def test_a_fresh_row_has_a_process_of_its_own(tmp_path: Path) -> None:
    rows = [Row(name, PLANTED, "who", fresh=name == "fresh") for name in ("first", "second", "fresh", "last")]
    out = tmp_path / "gpu.jsonl"
    check_rows(rows, out)
    first, second, fresh, last = (row["pid"] for row in read(out)[:4])
    assert first == second and len({first, fresh, last}) == 3


def test_what_is_chosen_stands_behind_the_first_row() -> None:
    """Of all: it says whether dhp can be imported."""
    first = SECTIONS[0].rows[0]
    assert choose([""], None) == list(SECTIONS)
    assert [one.name for one in choose([""], "waits")] == ["probe", "waits", "profile", "recompute"]
    assert choose([""], "waits")[0].rows == (first,)
    chosen = choose(["generation", "RMS"], None)
    assert [(one.name, len(one.rows)) for one in chosen] == [("probe", 1), ("generation", 1), ("kernels", 1)]
    assert [(one.name, len(one.rows)) for one in choose(["waits: 1+1"], None)] == [("probe", 1), ("waits", 1)]


def test_who_goes_on_belongs_to_the_last_run(tmp_path: Path) -> None:
    out = tmp_path / "gpu.jsonl"
    assert last_run(out) is None
    Results(out, "earlier").write({"section": "probe", "row": "machine"})
    Results(out).write({"section": "probe", "row": "machine"})
    Results(out, last_run(out)).write({"section": "waits", "row": "1+1"})
    runs = [row["run"] for row in read(out)]
    assert runs[0] == "earlier" and runs[1] == runs[2] != "earlier"


def test_without_a_gpu_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    out = tmp_path / "gpu.jsonl"
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--out", str(out)])
    assert main() == NO_DEVICE
    (row,) = read(out)
    assert row["error"].startswith("no CUDA device")


def test_an_older_torch_gets_a_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Called as dhp calls it, on a device without values: the kernel itself is there on GPUs alone."""

    def of_2_10(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, return_aux=None):  # noqa: ANN202
        raise AssertionError("called")

    assert stand_ins.WAY == "torch's own"
    monkeypatch.setattr(kernels, "varlen_attn", of_2_10)
    monkeypatch.setattr(varlen, "varlen_attn", of_2_10)
    assert stand_ins._provide() == "a stand-in for torch's, which lacks enable_gqa, scale, window_size"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert kernels.has_varlen(torch.device("cuda"), torch.bfloat16)  # the product takes it
    make = lambda heads: torch.empty(9, heads, 128, device="meta", dtype=torch.bfloat16, requires_grad=True)
    states = [make(16), make(2), make(2)]
    bounds = torch.empty(3, device="meta", dtype=torch.int32)
    output = kernels.attend_varlen(*states, bounds, 5, True, 0.1)
    gradients = torch.autograd.grad(output, states, torch.empty_like(output))
    assert [t.shape for t in (output, *gradients)] == [states[0].shape, *(state.shape for state in states)]
    with pytest.raises(NotImplementedError, match="no windows, and \\(4, 0\\) is one"):
        kernels.attend_varlen(*states, bounds, 5, True, 0.1, window=5)


def test_names_of_rows_are_their_own() -> None:
    for section in SECTIONS:
        names = [row.name for row in section.rows]
        assert len(set(names)) == len(names)


def test_sections_fit_their_time_and_say_layouts_that_there_are() -> None:
    """In two calls of seven minutes and of five and a half; each layout is tried, and by a name that is known."""
    assert sum((sections for _, sections in CALLS), ()) == SECTIONS
    shown = (ROOT / "scripts" / "gpu_check.sh").read_text()
    for seconds, sections in CALLS:
        assert sum(section.limit_s for section in sections) <= seconds - 10
        assert f"GPU_CHECK_S={seconds} scripts/gpu_check.sh --limit {seconds - 10} --only" in shown
        assert " ".join(section.name for section in sections) in shown
    assert sum(seconds for seconds, _ in CALLS) > LIMIT_S
    assert {name for name, _ in PARITY} == set(LAYOUTS) >= set(IN_ONE_PROCESS)
    assert [read_layout(name).family for name in ("2+2", "deepstack")] == ["qwen2_5_vl", "qwen3_vl"]
    assert read_layout("2+2").text.tensor == 2 and read_layout("2+2").vision.ulysses == 2


def test_parity_sees_another_model(tmp_path: Path) -> None:
    """Weights that went elsewhere, and a loss that is none."""
    weights = {"a": torch.zeros(3), "b": torch.ones(2)}
    moved = {"a": torch.tensor([0.1, 0.0, 0.2]), "b": torch.ones(2)}
    wanted = Trained([2.0, 1.5], [1.0, 1.0], weights, moved)
    assert wanted.moved() == pytest.approx({"a": 0.05**0.5})
    same = parity._deviations(wanted, wanted)
    assert same == {"loss": 0.0, "norm": 0.0, "update": 0.0}
    off = parity._deviations(Trained([2.0, 1.8], [1.0, 1.0], {}, moved | {"a": torch.zeros(3)}), wanted)
    assert off == pytest.approx({"loss": 0.2, "norm": 0.0, "update": 1.0})
    assert parity._deviations(Trained([float("nan"), 1.5], [1.0, 1.0], {}, moved), wanted)["loss"] == math.inf


def test_intervals_on_a_stream() -> None:
    kernels, copies = full_depth.union([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0)]), full_depth.union([(2.5, 5.5)])
    assert kernels == [(0.0, 3.0), (5.0, 6.0)]
    assert (full_depth.total(kernels), full_depth.overlap(kernels, copies)) == (4.0, 1.0)


@pytest.mark.slow
def test_a_rank_starts_where_ray_is_missing() -> None:
    hidden = (
        "import importlib.util as u, sys; find = u.find_spec;"
        "u.find_spec = lambda name, package=None: None if name == 'ray' else find(name, package);"
        "import experiments.gpu_check.stand_ins; import dhp.cluster.worker as worker;"
        "print(hasattr(worker.ray, '__file__'), issubclass(worker.ray.exceptions.RayError, Exception))"
    )
    done = subprocess.run([sys.executable, "-c", hidden], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]


def test_a_stand_in_for_ray_has_what_a_rank_on_a_gpu_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its node's address, which errors name; on CPUs nothing asks for it."""
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    stand_ins._provide_ray()
    monkeypatch.setattr(host, "ray", sys.modules["ray"])
    assert host.whereabouts("vision rank 0") == "node 127.0.0.1, where vision rank 0 runs"


def test_an_older_torch_gets_the_later_names_of_collectives() -> None:
    """All that the spans of collectives are put around."""
    assert all(hasattr(torch.distributed, name) for name in traffic._BLOCKING)
    assert inspect.signature(torch.distributed.reduce_scatter_single) == inspect.signature(
        torch.distributed.reduce_scatter_tensor
    )


def test_the_plain_towers_attention_is_in_one_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers calls the package flash-attn for all windows of a layer; with the numbers of one at a time."""
    calls = []

    def by_segment(query, key, value, bounds, longest, causal, scale):  # noqa: ANN202
        calls.append(len(bounds))
        parts = zip(*(one.split(bounds.diff().tolist()) for one in (query, key, value)), strict=True)
        batched = ([one.transpose(0, 1)[None] for one in part] for part in parts)
        found = [F.scaled_dot_product_attention(*part, is_causal=causal, scale=scale) for part in batched]
        return torch.cat([one[0].transpose(0, 1) for one in found])

    setting = Setting("cpu", tmp_path)
    folder = pair.make_shape(setting)
    monkeypatch.setattr(pair, "attend_varlen", by_segment)
    loop = pair.PlainLoop(setting, folder, pair.make_samples(folder, pair.sizes(setting, 2)), checkpointing=False)
    loss = lambda: float(loop.model(**loop._inputs, use_cache=False).loss.detach())
    wanted = loss()
    assert not calls
    pair.attend_in_one_call(loop.model)
    assert loss() == pytest.approx(wanted, rel=1e-5)
    assert len(calls) == pair.TINY_DEPTH
