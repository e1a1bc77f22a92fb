"""The main job as a user runs it: real entry, real actors, real files; against a plain transformers loop."""

import json
import os
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

from dhp.__main__ import main as dhp
from dhp.config.command_line import compose_config
from dhp.models.base_files import KEYS, RECORD, described_tensors, stored_tensors
from dhp.supervise.supervisor import Supervisor
from dhp.train_ray import main
from dhp.trainer.step_reports import NO_MFU
from tests.helpers.made_runs import make_run
from tests.helpers.rows import slow
from tests.helpers.runs import LONG, Outcome, tiny, train

STEPS = 4
UMASK = os.umask(0o022)
os.umask(UMASK)
FIELDS = (
    "kind step epoch loss grad_norm stage_norms lr tokens target_tokens vision_tokens samples images cached_images "
    "clips step_s data_s busy_s comm_s rank_pace tokens_per_s flops mfu memory_bytes activation_bytes graphs "
    "comm_bytes expert_load dist_ratio pad_ratio sp_ratio skipped_samples skipped_steps sample_digest preferences"
).split()


@pytest.fixture(scope="module")
def run_dir(long_run: tuple[Path, Outcome]) -> Path:
    return long_run[0]


@pytest.fixture(scope="module")
def outcome(long_run: tuple[Path, Outcome]) -> Outcome:
    return long_run[1]


@pytest.fixture(scope="module")
def exported(outcome: Outcome, run_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "model"
    assert dhp(["export", str(run_dir), str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def batches(outcome: Outcome, long_assets: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Tensor]]:
    folder = tmp_path_factory.mktemp("batches")
    for step in range(1, STEPS + 1):
        own = ["inspect", "batch", "--config-name=tiny", f"step={step}", f"out={folder / f'{step}.safetensors'}"]
        assert dhp([*own, f"tiny_assets={long_assets}", *LONG]) == 0
    return [load_file(folder / f"{step}.safetensors") for step in range(1, STEPS + 1)]


def metrics(run_dir: Path) -> list[dict]:
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == "train"]


def test_a_run_completes_and_leaves_what_it_should(outcome: Outcome, run_dir: Path) -> None:
    assert outcome.status == 0, outcome.stderr
    assert outcome.left == ()
    assert [list(line) for line in metrics(run_dir)] == [FIELDS] * STEPS
    assert [line["step"] for line in metrics(run_dir)] == [1, 2, 3, 4]
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["status"] == "completed" and summary["error"] is None and summary["steps"] == STEPS
    assert summary["first_loss"] == metrics(run_dir)[0]["loss"]
    assert summary["world"]["vision"]["ulysses"] == 2 and summary["world"]["text"]["tensor"] == 2
    assert {f.name for f in run_dir.iterdir()} >= {"config.yaml", "tb", "logs", "checkpoints"}
    assert "step 4/4" in outcome.stderr and "status         completed" in outcome.stdout


def test_a_run_says_what_it_does_until_its_first_step(outcome: Outcome) -> None:
    """Each phase on a line, when it begins, with the seconds since the command."""
    found = re.findall(r"^ *(\d+\.\d) s  ([\w,]+)", outcome.stdout, re.MULTILINE)
    begins = ["checking", "checking", "looking", "loading", "starting", "reserving", "starting", "starting", "opening"]
    assert [word for _, word in found] == [*begins, "1,039,168", "loading", "kernels", "kernels", "timing", "training"]
    assert "1,039,168 of 1,039,168 parameters are trained (100%)\n         part       group " in outcome.stdout
    seconds = [float(text) for text, _ in found]
    assert seconds == sorted(seconds)


def test_each_part_is_busy_for_a_share_of_each_step(outcome: Outcome, run_dir: Path) -> None:
    lines = metrics(run_dir)
    assert all(line["kind"] == "train" and set(line["busy_s"]) == {"vision", "text"} for line in lines)
    assert all(busy > 0 for line in lines for busy in line["busy_s"].values())
    for part in ("vision", "text"):  # of all steps: where a step's end is noticed late, the next one seems short
        assert sum(line["busy_s"][part] for line in lines) < sum(line["step_s"] for line in lines)
    idle = json.loads((run_dir / "summary.json").read_text())["idle_share"]
    assert set(idle) == {"vision", "text"} and all(0 < share < 1 for share in idle.values())
    assert f"idle           vision {idle['vision']:.0%}, text {idle['text']:.0%} of the steps' time" in outcome.stdout


def test_every_step_says_how_much_of_the_machine_it_used(outcome: Outcome, run_dir: Path) -> None:
    """Four ranks on the CPUs of one machine: its peak is measured once, and counts once. On a busy machine it may be
    measured so low that steps have no share, which is said once."""
    lines = metrics(run_dir)
    assert len(lines) == STEPS
    assert all(set(line["flops"]) == {"vision", "text"} and min(line["flops"].values()) > 10**6 for line in lines)
    shares = [line["mfu"] for line in lines if line["mfu"] is not None]
    peaks = [sum(line["flops"].values()) / (line["step_s"] * line["mfu"]) for line in lines if line["mfu"] is not None]
    assert peaks == pytest.approx(peaks[:1] * len(peaks)) and all(peak > 1e7 for peak in peaks)
    assert all(0 < share <= 1 for share in shares)
    assert (outcome.stdout + outcome.stderr).count(NO_MFU) == (len(shares) < STEPS)


def test_every_step_says_what_its_ranks_sent(outcome: Outcome, run_dir: Path) -> None:
    """Handed over: embeddings of 128 float32 for four patches each, as large gradients back, and each rank's norm."""
    for line in metrics(run_dir):
        vision, text = (line["comm_bytes"][part] for part in ("vision", "text"))
        assert vision["handoff"] == text["handoff"] == line["vision_tokens"] // 4 * 128 * 4 + 2 * 8
        assert set(vision) >= {"all_gather", "all_reduce", "handoff"} and set(text) == {"all_reduce", "handoff"}


def test_every_sample_has_its_loss(tiny_assets: Path, run_dir: Path, batches: list[dict[str, Tensor]]) -> None:
    """Of the first step, as the plain model has them one by one; of all steps, none is left out."""
    lines = [json.loads(line) for line in (run_dir / "ranks.jsonl").read_text().splitlines()]
    for line, told in zip(lines, metrics(run_dir), strict=True):
        assert {name: len(of) for name, of in line["losses"].items()} == {
            name: len(of) for name, of in line["samples"].items()
        }
        found = [loss for of in line["losses"].values() for loss in of if loss is not None]  # None: it was skipped
        assert len(found) == told["samples"] and min(found) <= told["loss"] <= max(found)
    model = AutoModelForImageTextToText.from_pretrained(tiny_assets / "model", dtype=torch.float32)
    alone = []
    for key in sorted({key.rpartition("/")[0] for key in batches[0]}):
        named = {name.rpartition("/")[2]: t for name, t in batches[0].items() if name.startswith(f"{key}/")}
        labels = named.pop("labels")[:, 1:]
        with torch.no_grad():
            logits = model(**named, use_cache=False).logits[:, :-1]
        sums = F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=-100, reduction="none").sum(-1)
        alone += (sums / (labels != -100).sum(-1)).tolist()
    first = [loss for of in lines[0]["losses"].values() for loss in of]
    assert sorted(first) == pytest.approx(sorted(alone), rel=1e-3)  # four digits are written


def plain_step(model: torch.nn.Module, batch: dict[str, Tensor]) -> float:
    """Loss of a step of `inspect`, gradients left on the model: Σ token losses / all targets of the file."""
    keys = sorted({key.rpartition("/")[0] for key in batch})
    targets = sum(int((batch[f"{key}/labels"][:, 1:] != -100).sum()) for key in keys)
    total = 0.0
    for key in keys:
        named = {name.rpartition("/")[2]: t for name, t in batch.items() if name.startswith(f"{key}/")}
        labels = named.pop("labels")
        logits = model(**named, use_cache=False).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100, reduction="sum")
        (loss / targets).backward()
        total += loss.item() / targets
    return total


def test_every_step_equals_plain_transformers(
    tiny_assets: Path, run_dir: Path, batches: list[dict[str, Tensor]], exported: Path
) -> None:
    model = AutoModelForImageTextToText.from_pretrained(tiny_assets / "model", dtype=torch.float32).train()
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters())
    for number, (batch, told) in enumerate(zip(batches, metrics(run_dir), strict=True)):
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] = 1.5e-3 * (1 - number / STEPS)  # a line to nothing
        assert told["lr"] == pytest.approx(dict.fromkeys(("vision", "text"), optimizer.param_groups[0]["lr"]))
        assert told["loss"] == pytest.approx(plain_step(model, batch), rel=1e-5)
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        assert told["grad_norm"] == pytest.approx(norm, rel=1e-5)
        assert told["stage_norms"].keys() == {"vision", "text"} and min(told["stage_norms"].values()) > 0
        assert sum(one**2 for one in told["stage_norms"].values()) == pytest.approx(norm**2, rel=1e-5)
        optimizer.step()
    trained = AutoModelForImageTextToText.from_pretrained(exported, dtype=torch.float32)
    wanted = {name: p.detach() for name, p in model.named_parameters()}
    apart = sum(float((p.detach() - wanted[n]).pow(2).sum()) for n, p in trained.named_parameters())
    went = sum(float((p - start[n]).pow(2).sum()) for n, p in wanted.items())
    assert (apart / went) ** 0.5 < 1e-4


def test_an_export_has_the_keys_and_files_of_the_model_that_training_began_with(
    exported: Path, run_dir: Path, long_assets: Path
) -> None:
    known = described_tensors(run_dir / "checkpoints" / f"step_{STEPS}" / "model")
    before, after = stored_tensors(long_assets / "model"), stored_tensors(exported)
    about = lambda stored: {key: (one.file.name, one.kind, one.shape, one.nbytes) for key, one in stored.items()}
    assert before and about(known) == about(before) == about(after)
    assert json.loads((exported / RECORD).read_text()) == {
        "dtype": "base", "tensors": {"float32": len(before)}, "carried": [], "left_out": [], "tied": []
    }  # fmt: skip
    assert not (exported / KEYS).exists()


def test_an_export_is_an_ordinary_model_directory(exported: Path, run_dir: Path) -> None:
    assert {oct(file.stat().st_mode)[-3:] for file in exported.iterdir()} == {oct(0o666 & ~UMASK)[-3:]}
    model, info = AutoModelForImageTextToText.from_pretrained(exported, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    from dhp.checkpoint.shard_reader import read_shards

    checkpoint = run_dir / "checkpoints" / f"step_{STEPS}"
    weights = read_shards(checkpoint / "vision") | read_shards(checkpoint / "text")
    assert all(torch.equal(weights[name], p) for name, p in model.named_parameters())
    tokenizer = AutoTokenizer.from_pretrained(exported)
    assert AutoImageProcessor.from_pretrained(exported).patch_size == model.config.vision_config.patch_size
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "Which shape?"}], add_generation_prompt=True)
    ids = torch.tensor([prompt["input_ids"] if hasattr(prompt, "keys") else prompt])
    assert model.generate(input_ids=ids, max_new_tokens=4).shape[1] > ids.shape[1]
    assert dhp(["export", str(run_dir), str(exported)]) == 1  # not over something that is there


@pytest.mark.slow
def test_the_same_configuration_gives_the_same_bits(outcome: Outcome, long_assets: Path, run_dir: Path) -> None:
    again = run_dir.with_name("again")
    assert train(*tiny(long_assets, again, *LONG)).status == 0
    for field in ("loss", "grad_norm"):
        assert [line[field] for line in metrics(again)] == [line[field] for line in metrics(run_dir)]
    for part in ("vision", "text"):
        for file in (run_dir / "checkpoints" / f"step_{STEPS}" / part).glob("*.safetensors"):
            mine, theirs = load_file(file), load_file(again / "checkpoints" / f"step_{STEPS}" / part / file.name)
            assert mine.keys() == theirs.keys() and all(torch.equal(mine[k], theirs[k]) for k in mine)


LINKED = ("cluster.transport=nccl", "plugins=[experiments.chaos.small_links]")  # by gloo here
INTERLEAVED = (
    *("text.parallelism=pipeline", "text.virtual_stages=2", "training.schedule=interleaved"),
    "training.eval_answers=0",
)
APART = ("cluster.collocate=false", "vision.parallelism=data", "text.num_actors=4", "text.data=2")


@pytest.mark.parametrize("layout", [(), slow(INTERLEAVED), slow(APART)], ids=["2+2", "interleaved", "apart"])
def test_tensors_from_rank_to_rank_give_the_same_digits(
    layout: tuple[str, ...], long_assets: Path, tmp_path: Path, run_dir: Path
) -> None:
    assert train(*tiny(long_assets, tmp_path / "run", *LONG, *LINKED, *layout)).status == 0
    found, wanted = metrics(tmp_path / "run"), metrics(run_dir)
    for field in ("loss", "grad_norm"):
        exact = [line[field] for line in wanted]
        assert [line[field] for line in found] == (pytest.approx(exact, rel=1e-6) if layout else exact)
    if not layout:  # each of the two tensor ranks is sent what both read before, so nothing went another way
        sent = [[line["comm_bytes"]["vision"]["handoff"] for line in of] for of in (found, wanted)]
        assert sent[0] == pytest.approx([2 * once for once in sent[1]], rel=0.01)


def test_it_has_a_page_with_its_evaluations(run_dir: Path) -> None:
    page = (run_dir / "report.html").read_text()
    assert "<svg" in page and "shapes" in page and "Which shape is this?" in page


def test_its_checkpoints_are_described(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert dhp(["inspect", "checkpoint", str(run_dir), "--verify"]) == 0
    shown = capsys.readouterr().out
    assert f"step_{STEPS}" in shown and "tensor" in shown and "ulysses" in shown


def test_a_supervised_run_that_is_given_up_has_its_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its last attempt did not know that it was the last. One that an attempt wrote is left alone."""
    run_dir = tmp_path / "run"
    make_run(run_dir)
    config = compose_config("tiny", None, [f"run_dir={run_dir}", "training.max_restarts=1"])
    monkeypatch.setattr(Supervisor, "run", lambda self: 1)
    monkeypatch.setattr(Supervisor, "opened", False)
    with pytest.raises(SystemExit):  # refused: what is in run_dir is another run's
        main(config)
    assert not (run_dir / "report.html").exists() and capsys.readouterr().err == ""
    monkeypatch.setattr(Supervisor, "opened", True)
    for shown in (f"report: {run_dir / 'report.html'}\n", ""):
        with pytest.raises(SystemExit) as ended:
            main(config)
        assert ended.value.code == 1 and capsys.readouterr().err == shown
        assert (run_dir / "report.html").stat().st_size > 1000
