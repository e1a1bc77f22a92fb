"""`evaluate`, `generate` and `inspect` of runs of every kind."""

import argparse
import base64
import io
import json
import re
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers import Qwen2VLImageProcessorPil

import experiments.baselines  # noqa: F401  it registers length_group
from dhp.__main__ import main
from dhp.__main__ import main as dhp
from dhp.cli.common import add_options, find_configuration
from dhp.cli.evaluate import NAME, _exact_by, _hide, _reading, _value_lines
from dhp.cli.generate import _configuration
from dhp.cli.inspect_data import content_table, value_table
from dhp.cli.sample_page import (
    CYAN,
    GREEN,
    PLAIN,
    Shown,
    TextRun,
    as_terminal,
    clips_of,
    lengths,
    pictures_of,
    placeholders,
    runs_of,
    sample_page,
)
from dhp.config.command_line import compose_config, to_yaml
from dhp.config.data import LimitsConfig
from dhp.config.generate_request import GenerateRequest
from dhp.config.resolve import resolve
from dhp.config.schema import Config
from dhp.core.batch import IGNORED, SOUND, ProcessorOutput
from dhp.core.errors import ConfigError
from dhp.core.preferences import Mark
from dhp.data.media.sources import Sound, Video
from dhp.data.read.annotations import Annotations, read_annotations, require_key
from dhp.data.read.records import Record, Turn
from dhp.data.sample.sample import LENGTH_COLUMNS, Sample, joined_sides
from dhp.models.contract.generic_processor import ContractProcessor
from dhp.models.contract.random_pictures import pack
from dhp.models.families.llava import LlavaProcessor
from dhp.models.families.qwen2_5_vl import qwen2_5_vl
from dhp.models.processor import Processor
from dhp.tiny.tiny_model import make_tokenizer, tiny_config
from dhp.trainer.evaluation import JudgedSample
from dhp.trainer.preflight import prepare
from tests.checkpoint.test_damage import flipped, write
from tests.helpers.rows import slow_but
from tests.helpers.runs import train


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--frames", "8,3"], "--frames 3: two frames are a step in time; take even numbers from 4 on"),
        (["--frames", "7"], "--frames 7: two frames"),
        (["--depths", "0,1.5"], "--depths 1.5: 0 is a video's beginning and 1 its end"),
        (["--needles", "0"], "--needles 0: at least one video"),
        (["--lasts", "8", "--frames", "8"], "--lasts 8: a needle has two frames or more, and fewer than --frames 8"),
        (["--shown", "1"], "--shown 1: two frames are a step in time; show 2 or more of each video"),
        (["--image", "a.png"], "--image, --question and --answer make a needle together"),
        (["--haystack", "v.mp4"], "--haystack without --image"),
    ],
)
def test_what_cannot_be_asked_is_refused(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "needle", "somewhere", *arguments]) == 1
    assert told in capsys.readouterr().err


def test_an_evaluation_that_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "needel", "x"]) == 2
    assert "needel is no evaluation; did you mean needle?" in capsys.readouterr().err
    assert main(["evaluate", "--help"]) == 0


def test_every_cell_has_needles_of_several_colours() -> None:
    given = Namespace(depths=(0.0, 1.0), frames=(8, 16), needles=3, image=None, seed=0, lasts=2)
    hidden = _hide(given)
    assert [(one.depth, one.frames) for one in hidden[::3]] == [(0.0, 8), (0.0, 16), (1.0, 8), (1.0, 16)]
    assert len({one.needle.answer for one in hidden[:3]}) == 3
    assert len({one.seed for one in hidden}) == len(hidden)


@pytest.mark.slow
def test_a_model_that_knows_nothing_finds_nothing(tmp_path: Path, tiny_assets: Path) -> None:
    Image.new("RGB", (56, 56), (250, 10, 10)).save(tmp_path / "red.png")
    own = ["--image", str(tmp_path / "red.png"), "--question", "Which?", "--answer", "red"]
    outcome = train(
        *("evaluate", "needle", str(tiny_assets / "model"), "--config-name=tiny", f"--out={tmp_path / 'out'}"),
        *("--frames=4,300", "--depths=0,1", "--needles=1", "--shown=100", *own),
        *("text.parallelism=sequence", "data.video_whole_frames=64"),
        module="dhp",
    )
    assert outcome.status == 0, outcome.stderr
    told = json.loads((tmp_path / "out" / "needle.json").read_text())
    assert told == {
        "model": str(tiny_assets / "model"),
        "frames": [4, 300],
        "depths": [0.0, 1.0],
        "needles": 1,
        "lasts": 2,
        "shown": 100,
        "found": [[0.0, 0.0], [0.0, 0.0]],
    }
    with Image.open(tmp_path / "out" / "needle.png") as drawn:
        assert drawn.width > 200


@pytest.fixture
def kinds(tmp_path: Path) -> Annotations:
    """Four questions: two of a kind, one of a kind that is a number, one of none."""
    turns = [{"role": "user", "content": "Is it?"}, {"role": "assistant", "content": "Yes."}]
    rows = [{"messages": turns} | kind for kind in ({"kind": "colour"}, {"kind": 3}, {}, {"kind": "colour"})]
    path = tmp_path / "kinds.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_annotations("asked", path, None)


def test_exact_answers_are_counted_by_what_annotations_say(kinds: Annotations) -> None:
    judged = [("", JudgedSample("asked", row, right, 2)) for row, right in enumerate((2, 1, 2, 1))]
    found = list(_exact_by("kind", {"asked": kinds}, judged))
    assert [(one["value"], one["samples"], one["exact"]) for one in found] == [
        *(("", 1, 1.0), ("3", 1, 0.0), ("colour", 2, 0.5))
    ]
    lines = [line.split() for line in _value_lines("kind", found)]
    assert lines[1:] == [
        ["asked", "(none)", "1", "100.0%"],
        ["asked", "3", "1", "0.0%"],
        ["asked", "colour", "2", "50.0%"],
    ]
    exchanged = list(_exact_by("kind", {"asked": kinds}, [("own", judged[0][1]), ("others", judged[1][1])]))
    assert [(one["images"], one["value"]) for one in exchanged] == [("others", "3"), ("own", "colour")]


def test_samples_are_counted_by_what_annotations_say(kinds: Annotations) -> None:
    assert [line.split() for line in value_table({"asked": kinds}, "kind")[2:]] == [
        *(["asked", "colour", "2", "50.0%"], ["asked", "3", "1", "25.0%"], ["asked", "(none)", "1", "25.0%"])
    ]


def test_a_key_that_no_annotation_has_is_refused(kinds: Annotations) -> None:
    with pytest.raises(ConfigError, match="--by length: none of the first 100 samples of asked has the key 'length'"):
        require_key({"asked": kinds}, "length", "--by length")


ONE_TEXT = ("text.parallelism=none", "text.num_actors=1")
FROZEN = ("training.frozen=[vision,projector]", "vision.zero_stage=0")
FSDP = ("text.zero_stage=3", "text.zero_engine=fsdp")
KINDS: dict[str, tuple[str, ...]] = {
    "limits of balanced": ("data.balance=balanced", "data.limits.text=200", "training.schedule=vision_ahead"),
    "all limits": (
        *("data.balance=isf", "data.limits.text=200", "data.limits.vision=300", "data.limits.full_text=50"),
        *("data.limits.full_vision=90", "training.groups.projector={{learning_rate: 0.1, warmup_steps: 1}}"),
    ),
    "long tokens": (
        "data.balance=balanced",
        "data.long_tokens=80",
        "data.max_tokens=4000",
        "text.compile=true",
        *ONE_TEXT,
    ),
    "a window": ("data.balance=isf", "data.balance_window=64", "training.max_steps=9", "text.parallelism=autotp"),
    "like lengths, padded": (
        *("data.packing=false", "data.balance=length_group", "training.num_epochs=2"),
        "plugins=[experiments.baselines]",
    ),
    "kept features": ("data.cache_features={folder}/features", "data.cache_features_gib=1", *FROZEN),
    "evaluated": (
        *("training.eval_answers=2", "data.eval_datasets=[shapes]", "training.best_metric=eval_loss/shapes"),
        *("training.save_steps=2", "training.loggers=[wandb]", "training.logger_project=mine"),
    ),
    "planned recomputing": ("text.recompute=auto", "memory.budget_gib=1", "data.shuffle=false"),
    "interleaved": (
        *("text.parallelism=pipeline", "text.virtual_stages=2", "training.schedule=interleaved"),
        *("training.batch_size=8", "training.micro_batch_size=1"),
    ),
    "1f1b": ("text.parallelism=pipeline", "text.cuts=[1]", "training.schedule=1f1b"),
    "deepspeed": ("text.parallelism=deepspeed", "text.zero_stage=3", "vision.parallelism=deepspeed"),
    "a shared row by FSDP2": ("text.parallelism=sequence", *FSDP),
    "12 bytes of states": ("text.parallelism=sequence", "text.dtype=bfloat16", "text.state_bytes=12", *FSDP),
    "adapters": ("text.lora.rank=2", "text.lora.dropout=0.1", "training.resume=auto", "data.on_bad_sample=skip"),
}
QUICK = ("all limits", "kept features", "evaluated", "interleaved", "a shared row by FSDP2", "adapters")
LAID_OUT = {"interleaved": ONE_TEXT, "1f1b": ONE_TEXT}  # a pipeline cannot answer, as generate says


@pytest.mark.parametrize("kind", slow_but(KINDS, *QUICK))
def test_any_run_is_evaluated_and_asked(kind: str, tmp_path: Path, tiny_assets: Path) -> None:
    run_dir = tmp_path / "run"
    checkpoint = run_dir / "checkpoints" / "step_1"
    checkpoint.mkdir(parents=True)
    (checkpoint / "checkpoint.json").write_text(json.dumps({"step": 1}))
    own = [setting.format(folder=tmp_path) for setting in KINDS[kind]]
    known = [setting for setting in own if setting.startswith("plugins=")]  # a run's file alone runs no code
    trained = resolve(compose_config("tiny", overrides=[f"tiny_assets={tiny_assets}", f"run_dir={run_dir}", *own]))
    (run_dir / "config.yaml").write_text(to_yaml(trained))

    loss, found = find_configuration(options(run_dir, ["data.eval_datasets=[shapes]", *known]))
    assert found is not None
    of_plain_rows(prepare(loss, new_run=False))

    (tmp_path / "a.jsonl").write_text("")
    needle, _ = find_configuration(options(run_dir, known), [NAME])
    of_plain_rows(prepare(_reading(needle, tmp_path / "a.jsonl", 16), new_run=False))

    request = GenerateRequest(prompt="a", checkpoint=str(run_dir))
    given = argparse.Namespace(config_name=None, config_path=None)
    asked, found = _configuration(request, given, (*LAID_OUT.get(kind, ()), *known))
    assert found is not None
    of_plain_rows(prepare(asked, new_run=False, reads=False))


def options(run_dir: Path, settings: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_options(parser)
    return parser.parse_args([str(run_dir), *settings])


def of_plain_rows(config: Config) -> None:
    assert (config.data.balance, config.data.balance_window, config.data.long_tokens) == ("random", None, None)
    assert config.data.limits == LimitsConfig()


def test_a_run_and_one_checkpoint_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (2, 4):
        write(tmp_path / "checkpoints", step)
    assert dhp(["inspect", "checkpoint", str(tmp_path), "--verify"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["checkpoint", str(tmp_path / "checkpoints" / "step_4")]
    assert lines[1].startswith("step           4, format 2, ")
    assert lines[3].startswith("vision         1 tensors in F32 in 2 pieces, 2 pieces of the optimizer's states, ")
    assert [line.split() for line in lines[-2:]] == [["step_4", "sound"], ["step_2", "sound"]]
    assert dhp(["inspect", "checkpoint", str(tmp_path / "checkpoints" / "step_2"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["step"], found["checkpoints"], found["parts"]["text"]["ranks"]) == (2, {"step_2": "sound"}, 2)


def test_damage_is_named_and_the_newest_sound_one_described(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (2, 4, 6):
        write(tmp_path, step)
    file = tmp_path / "step_4" / "text" / "rank_00001.safetensors"
    file.write_bytes(flipped(file.read_bytes(), 1))
    (tmp_path / "step_6" / "checkpoint.json").unlink()
    assert dhp(["inspect", "checkpoint", str(tmp_path)]) == 1  # sizes alone do not show it
    assert "step_4         sound" in capsys.readouterr().out
    assert dhp(["inspect", "checkpoint", str(tmp_path), "--verify"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("step_2") and lines[-1] == "step_2         sound"
    assert f"{file} is damaged (its crc32 is" in lines[-2] and "checkpoint.json is missing" in lines[-3]
    assert dhp(["inspect", "checkpoint", str(tmp_path / "step_6")]) == 1
    assert dhp(["inspect", "checkpoint", str(tmp_path / "nowhere")]) == 1
    assert "is no directory" in capsys.readouterr().err


def content_lengths(*samples: tuple[int, int, int]) -> np.ndarray:
    """Of samples of so many tokens, pictures and tokens of sound."""
    columns = np.zeros(len(samples), LENGTH_COLUMNS)
    for at, (text, pictures, sound) in enumerate(samples):
        columns[at]["text"], columns[at]["pictures"], columns[at]["sound"] = text, pictures, sound
    return columns


def test_shares_are_of_usable_samples_and_their_tokens() -> None:
    photos = content_lengths((10, 1, 0), (20, 1, 0), (0, 0, 0), (30, 2, 0), (15, 7, 5))
    chat = content_lengths((925, 0, 0))
    table = content_table({"photos": photos, "chat": chat, "broken": content_lengths((0, 0, 0))})
    shown = {line.split()[0]: line.split()[1:] for line in table[2:5]}
    assert shown["photos"] == ["4", "80.0%", "75", "7.5%", "0.0%", "50.0%", "25.0%", "25.0%", "25.0%"]
    assert shown["chat"] == ["1", "20.0%", "925", "92.5%", "100.0%", "0.0%", "0.0%", "0.0%", "0.0%"]
    assert shown["all"] == ["5", "100.0%", "1,000", "100.0%", "20.0%", "40.0%", "20.0%", "20.0%", "20.0%"]
    assert not any("broken" in line for line in table)


def test_one_dataset_needs_no_sum() -> None:
    assert not any(line.startswith("all") for line in content_table({"chat": content_lengths((5, 0, 0))}))


def test_a_dataset_may_be_named_all() -> None:
    table = content_table({"all": content_lengths((5, 1, 0)), "chat": content_lengths((15, 0, 0))})
    assert [line.split()[:5] for line in table[2:5]] == [
        ["all", "1", "50.0%", "5", "25.0%"],
        ["chat", "1", "50.0%", "15", "75.0%"],
        ["all", "2", "100.0%", "20", "100.0%"],
    ]


RUNS = [
    TextRun("<|user|>Is it ", 5, 0, False),
    TextRun("<|image_pad|>", 12, 1, False),
    TextRun("\x1b[31mred & <b>?\n", 6, 0, False),
    TextRun("Yes.\nIt is.", 4, 0, True),
    TextRun("<|image_pad|>", 4, 1, False),
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer(["What colour is it? It is red."], 300)


def make_sample(tokenizer: Any, text: str, learned: str, **more: Any) -> Sample:
    """A sample of that text; the tokens of `learned` in it are targets."""
    told = tokenizer(text, return_offsets_mapping=True)
    ids, offsets = np.array(told["input_ids"]), np.array(told["offset_mapping"])
    start = text.index(learned)
    target = (offsets[:, 0] >= start) & (offsets[:, 0] < start + len(learned))
    kinds = np.where(ids == tokenizer.convert_tokens_to_ids("<|image_pad|>"), 1, 0)
    return Sample("set", 1, ids, np.where(target, ids, IGNORED), kinds, more.get("pixels", ()), more.get("grids", ()))


def test_runs_are_the_text_cut_where_something_changes(tokenizer: Any) -> None:
    text = "<|im_start|>What é<|image_pad|><|image_pad|> colour?<|im_end|>It is red.<|im_end|>"
    sample = make_sample(tokenizer, text, "It is red.<|im_end|>")
    runs = runs_of(sample, tokenizer)
    assert [(run.text, run.kind, run.learned) for run in runs] == [
        ("<|im_start|>What é", 0, False),
        ("<|image_pad|>", 1, False),
        (" colour?<|im_end|>", 0, False),
        ("It is red.<|im_end|>", 0, True),
    ]
    assert sum(run.tokens for run in runs) == len(sample.input_ids) and runs[1].tokens == 2
    assert lengths(sample) == {
        "text": len(sample.input_ids) - 2, "images": 2, "videos": 0, "sound": 0,
        "together": len(sample.input_ids), "learned": sample.target_tokens,
    }  # fmt: skip


def test_the_first_token_is_never_learned(tokenizer: Any) -> None:
    text = "It is red."
    first, second = runs_of(make_sample(tokenizer, text, text), tokenizer)
    assert (first.tokens, first.learned, second.learned) == (1, False, True) and first.text + second.text == text


def test_an_answer_to_another_prompt_is_not_learned(tokenizer: Any) -> None:
    own, other = (
        replace(make_sample(tokenizer, text, text), mark=Mark(side)) for text, side in (("It is red.", 1), ("No.", 0))
    )
    assert any(run.learned for run in runs_of(own, tokenizer)) and not any(
        run.learned for run in runs_of(other, tokenizer)
    )
    assert lengths(joined_sides(own, other))["learned"] == own.target_tokens


def test_the_prompt_without_colours_and_with_them() -> None:
    assert as_terminal(RUNS, colours=False) == (
        "<|user|>Is it ⟨<|image_pad|> × 12⟩\\x1b[31mred & <b>?\n⟦Yes.\nIt is.⟧⟨<|image_pad|> × 4⟩"
    )
    coloured = as_terminal(RUNS, colours=True)
    assert f"{GREEN}Yes.{PLAIN}\n{GREEN}It is.{PLAIN}" in coloured and f"{CYAN}<|image_pad|> × 12{PLAIN}" in coloured
    assert coloured.count("\x1b") == 2 * 4  # none of the data's own
    assert placeholders(RUNS) == ["<|image_pad|> × 16 in 2 runs"]


def test_the_page_escapes_all_that_comes_from_data() -> None:
    evil = "<script>alert(1)</script>\"'&\x1b"
    runs = [TextRun(evil, 3, 0, True), TextRun(evil, 3, 1, False), TextRun(evil, 3, 0, False)]
    page = sample_page(evil, runs, {"text": 6, "images": 3}, [evil], [Shown(evil, (Image.new("RGB", (4, 2), "red"),))])
    assert "<script" not in page and "\x1b" not in page and page.count("&lt;script&gt;alert(1)") == 7
    assert '<span class="learned">' in page and '<span class="place">' in page
    assert re.findall(r'src="([^,]*),', page) == ["data:image/png;base64"]
    assert "http://" not in page and "https://" not in page and "default-src 'none'" in page
    assert embedded(page)[0].getpixel((0, 0)) == (255, 0, 0)


def embedded(page: str) -> list[Image.Image]:
    return [Image.open(io.BytesIO(base64.b64decode(found))) for found in re.findall(r'base64,([^"]*)"', page)]


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    """Blocks of random colours: any two patches differ."""
    levels = np.random.default_rng(seed).integers(0, 255, (height // 4, width // 4, 3), dtype=np.uint8)
    return Image.fromarray(levels).resize((width, height), Image.Resampling.NEAREST)


def shown_of(file: Any, pixels: np.ndarray, grid: Any, processor: Any, image_processor: Any) -> Shown:
    record = Record("set", 1, "line 1", (Turn("user", (file,)),))
    empty = np.zeros(0, dtype=np.int64)
    sample = Sample("set", 1, empty, empty, empty, (pixels,), (grid,))
    (shown,) = pictures_of(record, sample, processor, image_processor)
    return shown


def apart(left: Image.Image, right: Image.Image) -> float:
    return float(np.abs(np.asarray(left, dtype=float) - np.asarray(right, dtype=float)).max())


def test_an_image_is_put_together_from_the_patches_that_the_model_gets(tokenizer: Any, tmp_path: Path) -> None:
    noise(120, 80).save(tmp_path / "a.png")
    pictures = Qwen2VLImageProcessorPil(min_pixels=56 * 56, max_pixels=168 * 168)
    processor = qwen2_5_vl(tiny_config(tokenizer)).processor
    pixels, grid = processor.patches(pictures(images=[Image.open(tmp_path / "a.png")], return_tensors="np"))
    shown = shown_of(tmp_path / "a.png", pixels, grid, processor, pictures)
    (image,) = shown.images
    assert image.size == (112, 84)
    assert apart(image, Image.open(tmp_path / "a.png").resize((112, 84), Image.Resampling.BICUBIC)) <= 1
    assert (
        shown.caption == f"image 1: {tmp_path / 'a.png'}, 12 tokens; 120 × 80 pixels, which the model sees as 112 × 84"
        " (scaled by 0.933 across, 1.050 down)"
    )


@pytest.mark.parametrize("page", [False, True])
def test_patches_in_another_order_are_not_passed_off_as_the_picture(tokenizer: Any, tmp_path: Path, page: bool) -> None:
    picture = noise(112, 84)
    if page:  # nearly white all over
        picture = Image.new("RGB", (112, 84), "white")
        picture.paste("black", (8, 4, 60, 10))
    picture.save(tmp_path / "a.png")
    pictures = Qwen2VLImageProcessorPil(min_pixels=56 * 56, max_pixels=168 * 168)
    processor = qwen2_5_vl(tiny_config(tokenizer)).processor
    pixels, grid = processor.patches(pictures(images=[Image.open(tmp_path / "a.png")], return_tensors="np"))
    shown = shown_of(tmp_path / "a.png", pixels[::-1], grid, processor, pictures)
    assert apart(shown.images[0], Image.open(tmp_path / "a.png")) == 0  # which has the model's size already
    assert "which the model sees as 112 × 84. Scaled here by Pillow, because" in shown.caption
    unknown = SimpleNamespace(frames=lambda *_: None, image_tokens=lambda _: 3, from_patches=lambda _: True)
    assert "Drawn as the file has it" in shown_of(tmp_path / "a.png", pixels, grid, unknown, pictures).caption


def test_frames_of_a_video(tokenizer: Any, tmp_path: Path) -> None:
    pictures = Qwen2VLImageProcessorPil(min_pixels=56 * 56, max_pixels=168 * 168)
    processor = qwen2_5_vl(tiny_config(tokenizer)).processor
    frames = [noise(56, 56, seed) for seed in range(40)]
    groups = [
        processor.video_patches(pictures(images=frames[at : at + 2], return_tensors="np"))[0] for at in range(0, 40, 2)
    ]
    shown = shown_of(Video(tmp_path / "v.mp4"), np.concatenate(groups), (20, 4, 4), processor, pictures)
    assert len(shown.images) == 16
    assert all(apart(image, frames[number]) <= 1 for image, number in ((shown.images[0], 0), (shown.images[-1], 39)))
    assert shown.caption.startswith(
        f"video 1: {tmp_path / 'v.mp4'}, 80 tokens; 40 frames that the model sees as 56 × 56"
    )
    assert "here frames 1, 4, " in shown.caption and shown.caption.endswith("40 of 40")


def test_tiles_of_a_family_without_code_of_its_own(tmp_path: Path) -> None:
    tiles = np.stack([np.asarray(noise(28, 28, seed), dtype=np.float32).transpose(2, 0, 1) / 255 for seed in range(3)])
    rows, form = pack({"pixel_values": tiles[None], "image_sizes": np.array([[28, 84]])}, 12, 147)
    noise(84, 28).save(tmp_path / "a.png")
    processor = ContractProcessor.__new__(ContractProcessor)
    plain = SimpleNamespace(do_normalize=False, do_rescale=True, rescale_factor=1 / 255)
    shown = shown_of(tmp_path / "a.png", rows, form, processor, plain)
    assert [apart(image, noise(28, 28, seed)) for seed, image in enumerate(shown.images)] == [0, 0, 0]
    assert shown.caption.endswith("12 tokens; 84 × 28 pixels, which the model sees as 3 of 28 × 28")
    flat, patches = pack({"pixel_values": np.zeros((1, 8, 147), np.float32)}, 2, 147)
    assert processor.frames(flat, patches) is None and processor.frames(flat, (1, 2, 4)) is None


def test_patches_of_a_family_without_code_of_its_own(tokenizer: Any, tmp_path: Path) -> None:
    noise(120, 80).save(tmp_path / "a.png")
    pictures = Qwen2VLImageProcessorPil(min_pixels=56 * 56, max_pixels=168 * 168)
    output = pictures(images=[Image.open(tmp_path / "a.png")], return_tensors="np")
    rows, form = pack({name: output[name] for name in ("pixel_values", "image_grid_thw")}, 12, 588)
    processor = ContractProcessor.__new__(ContractProcessor)
    processor.config = tiny_config(tokenizer)
    (image,) = shown_of(tmp_path / "a.png", rows, form, processor, pictures).images
    assert apart(image, Image.open(tmp_path / "a.png").resize((112, 84), Image.Resampling.BICUBIC)) <= 1


def test_a_processor_that_cannot_tell_says_so() -> None:
    assert Processor.frames(SimpleNamespace(), np.zeros((4, 4)), (1, 2, 2)) is None


def test_llavas_images_of_one_size() -> None:
    vision = SimpleNamespace(num_channels=3, image_size=28, patch_size=7, model_type="clip_vision_model")
    processor = LlavaProcessor(SimpleNamespace(image_token_id=1, vision_config=vision))
    image = np.random.default_rng(0).random((1, 3, 28, 28), dtype=np.float32)
    pixels, grid = processor.patches({"pixel_values": image})
    assert np.array_equal(processor.frames(pixels, grid), image.transpose(0, 2, 3, 1))


def test_a_clip_is_drawn_as_its_spectrum(tmp_path: Path) -> None:
    record = Record("set", 1, "line 1", (Turn("user", (Sound(tmp_path / "a.wav"),)),))
    features = np.arange(12, dtype=np.float32).reshape(4, 3)  # 4 frames, 3 bins
    ids = np.full(2, 7)
    kinds = np.full(2, SOUND)
    form = ProcessorOutput((), (), 4, 2)
    sample = Sample("set", 1, ids, ids, kinds, (), (), clips=(features,), clip_forms=(form,))
    (shown,) = clips_of(record, sample)
    assert shown.images[0].size == (4, 3) and shown.images[0].getpixel((3, 0)) == 255
    assert shown.caption == f"sound 1: {tmp_path / 'a.wav'}, 2 tokens; 4 frames of 3 bins"


def inspect(tiny_assets: Path, *more: str) -> int:
    return main(["inspect", "sample", "--config-name=tiny", f"tiny_assets={tiny_assets}", *more])


def test_a_sample_is_printed_and_written(capsys: pytest.CaptureFixture[str], tiny_assets: Path, tmp_path: Path) -> None:
    assert inspect(tiny_assets, "index=3", f"run_dir={tmp_path}", "data.balance=balanced") == 0
    told = capsys.readouterr().out
    raw = json.loads((tiny_assets / "data" / "annotations.json").read_text())[3]["conversations"]
    assert f"⟦{raw[1]['value']}<|im_end|>⟧" in told and "\x1b" not in told
    assert re.search(r"<\|vision_start\|>⟨<\|image_pad\|> × \d+⟩<\|vision_end\|>", told)
    assert re.search(r"tokens: text \d+, images \d+, videos 0, sound 0, together \d+, learned \d+", told)
    page = (tmp_path / "inspect_sample" / "3.html").read_text()
    assert f'<span class="learned">{raw[1]["value"]}&lt;|im_end|&gt;</span>' in page
    (image,) = embedded(page)
    assert f"which the model sees as {image.width} × {image.height}" in told
    assert [path.name for path in tmp_path.iterdir()] == ["inspect_sample"]


def test_a_sample_of_other_names_by_a_template_of_ones_own(
    capsys: pytest.CaptureFixture[str], tiny_assets: Path, tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"ask": "Hi?", "say": "Yes."}\n')
    template = tmp_path / "own.jinja"
    template.write_text(
        "{% for m in messages %}[{{ m['role'] }}]{% if m['role'] == 'assistant' %}<think></think>{% endif %}"
        "{{ m['content'][0]['text'] }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    columns = f"{{annotation_path: {rows}, columns: {{instruction: ask, output: say}}}}"
    own = [f"+data.data_registry.rows={columns}", "data.datasets=[rows]", "data.system_prompt='Be brief.'"]
    own += [f"data.chat_template={template}", "index=0", f"run_dir={tmp_path}"]
    for more, learned in ((), "<think></think>⟦Yes.⟧"), (["data.learn_empty_thoughts=true"], "⟦<think></think>Yes.⟧"):
        assert inspect(tiny_assets, *own, *more) == 0
        told = capsys.readouterr().out
        assert f"\n[system]Be brief.[user]Hi?[assistant]{learned}\n" in told and f"template: {template}\n" in told


def test_colours_are_for_terminals(
    capsys: pytest.CaptureFixture[str], tiny_assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for forbidden in ("", "1"):
        monkeypatch.setenv("NO_COLOR", forbidden)
        assert inspect(tiny_assets, "index=0", f"out={tmp_path / 'a.html'}") == 0
        assert ("\x1b[" in capsys.readouterr().out) == (not forbidden)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ([], "index=: samples are counted from 0; add for example index=0"),
        (["index=-1"], "index=-1: samples are counted from 0"),
        (
            ["index=256"],
            "index=256 is beyond the 256 samples that an epoch of shapes shows; samples are counted from 0,",
        ),
        (["index=0", "out=."], "out=. is a directory; give a file, for example out=sample.html"),
        (["index=0", "data.chat_template=no.jinja"], "data.chat_template=no.jinja cannot be read: No such file"),
        (["index=0", "other.yaml"], "other.yaml and --config-name=tiny all name the configuration"),
    ],
)
def test_what_cannot_be_shown_is_told(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tiny_assets: Path,
    tmp_path: Path,
    settings: list[str],
    told: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert inspect(tiny_assets, *settings) == 1
    assert told in capsys.readouterr().err and list(tmp_path.iterdir()) == []
