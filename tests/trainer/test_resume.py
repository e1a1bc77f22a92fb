"""Stopped runs go on; data that lie elsewhere."""

import json
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from dhp.checkpoint.folder import ABOUT
from dhp.checkpoint.resume import find_start
from dhp.config.command_line import compose_config
from dhp.config.schema import Config
from dhp.core.errors import CheckpointError, ConfigError, DhpError
from dhp.core.text import shell_command
from dhp.data.remote import remote_files
from dhp.plan.run_plan import plan_run
from dhp.train_ray import main
from dhp.trainer.preflight import prepare
from dhp.trainer.session import Session
from dhp.trainer.settings import held_files, needed_paths
from tests.helpers.buckets import Faults, buckets
from tests.helpers.graphs import make_graph
from tests.helpers.runs import BROKEN, LONG, Outcome, tiny, train

STEPS = 4


@pytest.fixture(scope="module")
def whole(long_run: tuple[Path, Outcome]) -> Path:
    """The directory of the run that was never interrupted."""
    run_dir, ended = long_run
    assert ended.status == 0, ended.stderr
    return run_dir


@pytest.fixture
def stopped(whole: Path, tmp_path: Path) -> Path:
    """The same as it is when killed while it wrote a line of step 4: metrics go beyond the newest checkpoint."""
    run_dir = tmp_path / "run"
    shutil.copytree(whole, run_dir, symlinks=True)
    checkpoints = run_dir / "checkpoints"
    (checkpoints / "step_4").rename(checkpoints / "step_4.partial")
    for file in ("best", "best.json"):
        (checkpoints / file).unlink()
    metrics = run_dir / "metrics.jsonl"
    metrics.write_text(metrics.read_text()[:-40])
    return run_dir


def lines_of(run_dir: Path, kind: str = "train") -> list[dict]:
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == kind]


def summary(run_dir: Path) -> dict:
    return json.loads((run_dir / "summary.json").read_text())


def assert_same_checkpoint(mine: Path, theirs: Path) -> None:
    files = sorted(file.relative_to(theirs) for file in theirs.rglob("*.safetensors"))
    assert files == sorted(file.relative_to(mine) for file in mine.rglob("*.safetensors"))
    assert len(files) == 7  # weights 1 + 2, optimizer state 2 + 2
    for file in files:
        found, wanted = load_file(mine / file), load_file(theirs / file)
        assert found.keys() == wanted.keys()
        assert not [name for name in wanted if not torch.equal(found[name], wanted[name])], file
    assert json.loads((mine / ABOUT).read_text()) == json.loads((theirs / ABOUT).read_text())


def test_a_checkpoint_every_save_steps_and_nothing_pickled(long_run: tuple[Path, Outcome], whole: Path) -> None:
    """Of four that were written the two newest are left, of which one is the best."""
    checkpoints = whole / "checkpoints"
    assert [f"step_{step} is saved: " in long_run[1].stderr for step in range(1, STEPS + 1)] == [True] * STEPS
    assert sorted(path.name for path in checkpoints.iterdir()) == ["best", "best.json", "step_3", "step_4"]
    files = [file for part in ("vision", "text") for file in (checkpoints / "step_3" / part).rglob("*.*")]
    assert files and {file.suffix for file in files if file.is_file()} == {".safetensors", ".json"}
    about = json.loads((checkpoints / "step_3" / ABOUT).read_text())
    settings = about["settings"]
    assert (about["step"], settings["training.batch_size"], settings["layout"]["vision.ulysses"]) == (3, 8, 2)
    assert summary(whole)["resumed_from"] is None


def test_a_broken_image_is_skipped_and_counted(long_run: tuple[Path, Outcome], whole: Path) -> None:
    said = long_run[1].stdout + long_run[1].stderr
    assert "skipped: " in said and all(name in said for name in BROKEN)
    assert [(line["samples"], line["skipped_samples"]) for line in lines_of(whole)] == [(8, 0), (7, 1), (8, 1), (7, 2)]


def test_a_stopped_run_goes_on_bit_for_bit(whole: Path, stopped: Path, long_assets: Path) -> None:
    outcome = train(*tiny(long_assets, stopped, *LONG, "training.resume=auto"))
    assert outcome.status == 0, outcome.stderr
    assert outcome.left == ()
    assert [line["step"] for line in lines_of(stopped)] == [1, 2, 3, 4]
    for field in ("loss", "grad_norm", "lr", "tokens", "epoch", "skipped_samples", "sample_digest"):
        assert [line[field] for line in lines_of(stopped)] == [line[field] for line in lines_of(whole)]
    assert lines_of(stopped, "answer") == lines_of(whole, "answer")
    evaluated = [[line | {"seconds": 0} for line in lines_of(run, "eval")] for run in (stopped, whole)]
    assert evaluated[0] == evaluated[1] and len(evaluated[0]) == 1 + STEPS
    assert_same_checkpoint(stopped / "checkpoints" / "step_4", whole / "checkpoints" / "step_4")
    told = summary(stopped)
    assert (told["status"], told["steps"]) == ("completed", STEPS)
    assert told["resumed_from"] == str(stopped / "checkpoints" / "step_3")
    assert told["first_loss"] == summary(whole)["first_loss"]
    assert f"continuing after step 3 from {stopped}/checkpoints/step_3" in outcome.stdout
    assert "step 4/4" in outcome.stderr and "step 3/4" not in outcome.stderr


@pytest.mark.slow
def test_a_stopped_run_goes_on_in_another_layout(whole: Path, stopped: Path, long_assets: Path) -> None:
    """With three replicas for a step's two rows, one of which has an empty place each step."""
    other = [
        "vision.parallelism=none",
        "vision.num_actors=1",
        "vision.zero_stage=0",
        "text.num_actors=3",
        "text.parallelism=data",
    ]
    more = ["training.empty_rows=true", "training.resume=auto"]
    outcome = train(*tiny(long_assets, stopped, *LONG, *other, *more))
    assert outcome.status == 0, outcome.stderr
    mine, theirs = lines_of(stopped), lines_of(whole)
    assert [line["step"] for line in mine] == [1, 2, 3, 4]
    for field in ("lr", "tokens", "epoch", "samples", "skipped_samples"):
        assert [line[field] for line in mine] == [line[field] for line in theirs]
    for field in ("loss", "grad_norm"):
        assert [line[field] for line in mine] == pytest.approx([line[field] for line in theirs], rel=1e-5)
    assert "another layout than the checkpoint's, whose tensors are cut anew: vision.num_actors 2 → 1" in outcome.stdout


@pytest.mark.slow
def test_a_finished_run_has_nothing_left_to_do(whole: Path, tmp_path: Path, long_assets: Path) -> None:
    run_dir = tmp_path / "next"
    arguments = tiny(long_assets, run_dir, *LONG, f"training.resume={whole / 'checkpoints' / 'step_4'}")
    outcome: Outcome = train(*arguments)
    assert outcome.status == 0, outcome.stderr
    assert "nothing is left to train: training.max_steps or num_epochs give 4 steps" in outcome.stdout
    assert lines_of(run_dir) == [] and not any(run_dir.glob("checkpoints/*"))
    assert (summary(run_dir)["steps"], summary(run_dir)["status"]) == (STEPS, "completed")
    assert f"{' '.join(shell_command('export'))} {whole}/checkpoints/step_4 OUT_DIR" in outcome.stdout


def refused(assets: Path, run_dir: Path, *overrides: str) -> str:
    """The message with which a run is refused before it starts anything."""
    config = compose_config("tiny", overrides=[*tiny(assets, run_dir, *LONG)[1:], *overrides])
    with pytest.raises((CheckpointError, ConfigError)) as caught:
        main(config)
    return str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["seed=7"], ["seed was 0 and is 7", "data's order", "Set what it had"]),
        (["training.batch_size=4"], ["training.batch_size was 8 and is 4"]),
        (["data.balance=isf"], ["balance was random and is isf"]),
        (["data.shuffle=false"], ["data.shuffle was True and is False"]),
        (["training.learning_rate=1"], ["training.learning_rate was 0.0015", "training.resume_changes=["]),
        (["training.frozen=[projector]"], ["training.frozen was [] and is ['projector']", "what its run trained"]),
    ],
    ids=lambda value: value[0] if "=" in value[0] else "",
)
def test_another_run_is_not_continued(stopped: Path, long_assets: Path, overrides: list[str], told: list[str]) -> None:
    before = (stopped / "metrics.jsonl").read_text()
    message = refused(long_assets, stopped, "training.resume=auto", *overrides)
    assert f"{stopped}/checkpoints/step_3 does not continue as this run is configured: " in message
    assert not [words for words in told if words not in message], message
    assert (stopped / "metrics.jsonl").read_text() == before  # refused before anything was cut


def test_a_checkpoint_that_is_not_there(stopped: Path, tmp_path: Path, long_assets: Path) -> None:
    run_dir = tmp_path / "next"
    nowhere = refused(long_assets, run_dir, f"training.resume={tmp_path / 'nowhere'}")
    assert nowhere == f"{tmp_path}/nowhere is no directory; give a run directory or a checkpoint in it"
    shutil.rmtree(stopped / "checkpoints" / "step_3")  # what is left was never finished
    assert "holds no complete checkpoint" in refused(long_assets, run_dir, f"training.resume={stopped}")
    assert not run_dir.exists()


def test_never_keeps_the_run_that_is_there(stopped: Path, long_assets: Path) -> None:
    message = refused(long_assets, stopped)
    assert "already holds a run" in message and "set training.resume=auto to continue that run" in message


def test_an_earlier_checkpoint_beside_newer_ones(whole: Path, long_assets: Path) -> None:
    message = refused(long_assets, whole, f"training.resume={whole / 'checkpoints' / 'step_3'}")
    assert "begins after step 3, but " in message and "holds step_4 already" in message


def test_other_data_under_the_same_name(stopped: Path, tmp_path: Path, long_assets: Path) -> None:
    """How many samples there are is known only when the dataset actor has read them: refused before any rank starts."""
    data = SimpleNamespace(take_watched=list, ask=lambda _, timeout_s: 7)
    config = prepare(compose_config("tiny", overrides=tiny(long_assets, tmp_path / "next", *LONG)[1:]))
    plan = replace(plan_run(config), graph=make_graph())
    session = Session(plan, tmp_path, find_start("auto", stopped / "checkpoints"))
    session._cluster = SimpleNamespace(dataset_actor=lambda *_, **__: data, devices={})
    with pytest.raises(CheckpointError, match=r"data\.samples was \d+ and is 7\. Reason: .* the data's order"):
        session.open_data(lambda done, parts: None)


SHAPES = "data.data_registry.shapes"


@pytest.fixture
def far(tiny_assets: Path, tmp_path: Path) -> Iterator[Faults]:
    """s3://bucket has the tiny dataset, and nothing is known of it."""
    shutil.copytree(tiny_assets / "data", tmp_path / "far" / "bucket")
    remote_files._about.cache_clear()
    remote_files._cache.cache_clear()
    with buckets(tmp_path / "far", "s3", "gs") as faults:
        yield faults


def prepared(assets: Path, tmp_path: Path, *overrides: str) -> Config:
    own = [f"tiny_assets={assets}", f"run_dir={tmp_path / 'new'}", f"data.cache_dir={tmp_path / 'cache'}"]
    return prepare(compose_config("tiny", overrides=[*own, *overrides]))


def there(base: str) -> list[str]:
    return [f"{SHAPES}.annotation_path={base}/annotations.json", f"{SHAPES}.data_path={base}"]


def test_addresses_stay_as_they_are(far: Faults, tiny_assets: Path, tmp_path: Path) -> None:
    config = prepared(tiny_assets, tmp_path, *there("s3://bucket"))
    entry = config.data.data_registry["shapes"]
    assert (entry.annotation_path, entry.data_path) == ("s3://bucket/annotations.json", "s3://bucket")
    assert not any("s3:" in path for needs in needed_paths(config, None).values() for path in needs.values())


def test_the_same_annotations_are_the_same_wherever_they_are(far: Faults, tiny_assets: Path, tmp_path: Path) -> None:
    """A run may go on with its data moved into a bucket, but not with other data."""
    local = held_files(prepared(tiny_assets, tmp_path))
    assert held_files(prepared(tiny_assets, tmp_path, *there("s3://bucket"))) == local
    moved = tmp_path / "far" / "bucket" / "annotations.json"
    moved.write_text(json.dumps(json.loads(moved.read_text())[:-1]))
    remote_files._about.cache_clear()
    changed = held_files(prepared(tiny_assets, tmp_path, *there("s3://bucket")))
    assert {key for key in local if local[key] != changed[key]} == {f"contents of {SHAPES}.annotation_path"}


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (there("s3://bucket/none"), "annotation_path=s3://bucket/none/annotations.json cannot be read: "),
        ([f"{SHAPES}.data_path=ssh://host/a"], "data_path=ssh://host/a: ssh:// addresses are not read"),
        (
            [f"{SHAPES}.annotation_path='s3://bucket/{{0..1}}.tar'"],
            "s3://bucket/{0..1}.tar cannot be read: s3://bucket/",
        ),
        (
            [f"{SHAPES}.annotation_path='/none/{{0..1}}.tar'"],
            "is not whole: /none/0.tar does not exist, which is one of",
        ),
        ([f"{SHAPES}.annotation_path='/none/{{0.tar'"], "annotation_path=/none/{0.tar"),
        (["data.fetch_tries=0"], "data.fetch_tries=0 is out of range"),
        (["data.cache_gib=-1"], "data.cache_gib=-1"),
    ],
)
def test_what_cannot_be_read_is_named_before_anything_starts(
    overrides: list[str], said: str, far: Faults, tiny_assets: Path, tmp_path: Path
) -> None:
    with pytest.raises(DhpError) as caught:
        prepared(tiny_assets, tmp_path, *overrides)
    assert said in str(caught.value)


def test_a_package_that_is_not_installed_is_named(
    tiny_assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(scheme: str) -> None:
        raise ImportError("no")

    monkeypatch.setattr("fsspec.get_filesystem_class", missing)
    with pytest.raises(
        ConfigError, match=f"{SHAPES}.annotation_path=gs://b/annotations.json needs gcsfs, .* install gcsfs"
    ):
        prepared(tiny_assets, tmp_path, *there("gs://b"))


class Unsteady(SimpleHTTPRequestHandler):
    """Refuses every seventh request, and breaks every eleventh answer off."""

    count = 0

    def do_GET(self) -> None:
        Unsteady.count += 1
        if Unsteady.count % 7 == 0:
            self.send_error(503)
            return
        if Unsteady.count % 11 == 0:
            path = Path(self.translate_path(self.path))
            self.send_response(200)
            self.send_header("Content-Length", str(path.stat().st_size))
            self.end_headers()
            self.wfile.write(path.read_bytes()[:50])
            self.close_connection = True
            return
        super().do_GET()

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def served(tiny_assets: Path) -> Iterator[str]:
    pytest.importorskip("aiohttp")
    handler = partial(Unsteady, directory=str(tiny_assets / "data"))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.slow
def test_a_run_from_an_unsteady_server_equals_one_from_the_disk(served: str, tiny_assets: Path, tmp_path: Path) -> None:
    found = {}
    for name, more in (("near", []), ("far", there(served))):
        own = [f"data.cache_dir={tmp_path / 'cache'}", "training.max_steps=3", "data.num_workers=2", *more]
        outcome = train(*tiny(tiny_assets, tmp_path / name, *own))
        assert outcome.status == 0, outcome.stderr
        lines = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        found[name] = [(line["loss"], line["grad_norm"], line["sample_digest"], line["images"]) for line in lines]
    assert found["far"] == found["near"] and len(found["near"]) == 3
    assert Unsteady.count > 7
    assert any(path.is_file() for path in (tmp_path / "cache" / "remote" / "files").rglob("*"))
