"""Exports of runs, and answers of their checkpoints."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from transformers import AutoConfig, AutoTokenizer

from dhp.__main__ import main
from dhp.cli.generate import answer_line
from dhp.data.sample.sample import area_bounds, tile_arguments
from dhp.models.pretrained import load_image_processor
from dhp.models.processor_files import find_frame_size
from dhp.observe.metrics import AnswerMetrics
from dhp.tiny.tiny_model import make_family
from dhp.trainer.export_run import _write_pictures, _write_stops, picture_settings
from tests.helpers.runs import ONE_ACTOR_EACH, Outcome, tiny, train

OTHER = "<|vision_pad|>"  # in the place of the tokenizer's eos


def folder_of(tiny_assets: Path, folder: Path, end: str, known: object) -> tuple[Path, list[int]]:
    """A model whose template ends answers with `end`; the numbers of its own end and of that."""
    shutil.copytree(tiny_assets / "model", folder)
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text().replace("<|im_end|>", end))
    (folder / "generation_config.json").write_text(json.dumps(known))
    return folder, AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids(["<|im_end|>", OTHER])


@pytest.mark.parametrize("listed", [False, True])
def test_others_stop_where_the_answers_that_were_learned_end(tiny_assets: Path, tmp_path: Path, listed: bool) -> None:
    first, _ = folder_of(tiny_assets, tmp_path / "a", "<|im_end|>", {})[1]
    folder, (_, end) = folder_of(
        tiny_assets, tmp_path / "b", OTHER, {"eos_token_id": [first] if listed else first, "top_k": 3}
    )
    assert f"has {OTHER} among the tokens that stop" in _write_stops(folder)
    written = json.loads((folder / "generation_config.json").read_text())
    assert written == {"eos_token_id": [first, end], "top_k": 3}
    assert _write_stops(folder) == ""


def test_an_end_that_only_the_tokenizer_names_is_written_too(tiny_assets: Path, tmp_path: Path) -> None:
    """`generate` of transformers looks at generation_config.json alone."""
    folder, (end, other) = folder_of(tiny_assets, tmp_path / "a", "<|im_end|>", {})
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": other}))
    assert _write_stops(folder)
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [other, end]


def test_a_model_without_a_tokenizer_stays_as_it_is(tiny_assets: Path, tmp_path: Path) -> None:
    folder, _ = folder_of(tiny_assets, tmp_path / "a", OTHER, {"eos_token_id": 1})
    for file in folder.glob("tokenizer*"):
        file.unlink()
    assert _write_stops(folder) == ""


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(
    ("family", "asked"),
    [
        ("qwen2_5_vl", {"max_pixels": 2048, "min_pixels": 512}),
        ("qwen3_vl", {"max_pixels": 2048}),
        ("internvl", {"max_tiles": 2}),
    ],
)
def test_the_librarys_processor_sees_pictures_as_training_did(
    tmp_path: Path, family: str, asked: dict[str, int], nested: bool
) -> None:
    folder = make_family(family, tmp_path / "m")
    if nested:
        file = folder / "preprocessor_config.json"
        (folder / "processor_config.json").write_text(json.dumps({"image_processor": json.loads(file.read_text())}))
        file.unlink()
    images = load_image_processor(str(folder))
    arguments = area_bounds(images, asked.get("min_pixels"), asked.get("max_pixels"))
    arguments |= tile_arguments(images, asked.get("max_tiles"))
    pictures = [Image.new("RGB", size) for size in ((300, 300), (8, 20), (400, 100))]
    wanted = [images(one, return_tensors="np", **arguments)["pixel_values"].shape for one in pictures]
    assert wanted != [images(one, return_tensors="np")["pixel_values"].shape for one in pictures]
    assert "processor_config.json" in _write_pictures(folder, asked)
    own = load_image_processor(str(folder))
    assert [own(one, return_tensors="np")["pixel_values"].shape for one in pictures] == wanted


def test_frames_are_bounded_in_the_video_processors_file_or_it_is_said(tmp_path: Path) -> None:
    of_frames, of_clip = (make_family(name, tmp_path / name) for name in ("qwen2_5_vl", "qwen3_vl"))
    asked = {"video_fps": 1.0, "video_max_pixels": 2048}
    assert "video_preprocessor_config.json read pictures as" in _write_pictures(of_frames, asked)
    rule = find_frame_size(str(of_frames), AutoConfig.from_pretrained(of_frames))
    assert rule is not None and (rule.clip, rule.shortest, rule.longest) == (False, 1024, 2048)
    told = "Qwen3VLVideoProcessor bounds all frames of a clip (1024 to 5000 pixels of all frames of a clip), and"
    own = {"video_processor_type": "Qwen3VLVideoProcessor", "size": {"shortest_edge": 1024, "longest_edge": 5000}}
    (of_clip / "video_preprocessor_config.json").write_text(json.dumps(own))
    assert f"{told} training had shortest_edge=1024, longest_edge=2048 for" in _write_pictures(of_clip, asked)
    assert json.loads((of_clip / "video_preprocessor_config.json").read_text()) == own | {"fps": 1.0}


def test_what_a_run_set_is_in_its_recipe() -> None:
    recipe = {"data.max_pixels": 7, "data.video_fps": 2.0, "data.max_tiles": None, "data.video_max_frames": 8}
    assert picture_settings({"settings": {"recipe": recipe}}) == {"max_pixels": 7, "video_max_frames": 8}
    assert picture_settings({"settings": {}}) == {} and _write_pictures(Path("none"), {}) == ""


PROMPT = "Which shape is this?"
NEW = 6


def plainly(model: Path, image: Path, question: str = PROMPT) -> str:
    """What plain transformers answers, by the lines that docs/checkpoints.md shows."""
    page = (Path(__file__).parents[2] / "docs/checkpoints.md").read_text()
    (lines,) = [one for one in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "generate(" in one]
    # The number first: paths that are put in may have it in them.
    own = {"128": NEW, "exported/qwen3b": model, "receipt.png": image, "What is on the receipt?": question}
    for shown, here in own.items():
        assert lines.count(shown) == 1, shown
        lines = lines.replace(shown, str(here))
    names: dict[str, Any] = {}
    exec(lines, names)
    return str(names["tokenizer"].decode(names["answer"], skip_special_tokens=True))


def generated(out: Path, *arguments: str) -> str:
    ended = train("generate", f"prompt={PROMPT}", f"max_new_tokens={NEW}", f"out={out}", *arguments, module="dhp")
    assert ended.status == 0 and ended.left == (), ended.stderr
    told = json.loads(out.read_text())
    assert told["text"] in ended.stdout and 1 <= len(told["token_ids"]) <= NEW
    return str(told["text"])


@pytest.mark.slow
def test_a_runs_checkpoint_answers_in_another_layout(
    long_run: tuple[Path, Outcome], tiny_assets: Path, tmp_path: Path
) -> None:
    image = tiny_assets / "data" / "images" / "00000_0.png"
    run_dir, _ = long_run
    assert main(["export", str(run_dir), str(tmp_path / "exported")]) == 0
    wanted = plainly(tmp_path / "exported", image)
    given = [f"checkpoint={run_dir}", f"images=[{image}]"]
    assert generated(tmp_path / "new" / "a.json", *given, "text.parallelism=sequence", "text.ring=2") == wanted
    exported = [f"checkpoint={tmp_path / 'exported'}", f"images={image}", "--config-name=tiny", *ONE_ACTOR_EACH]
    assert generated(tmp_path / "b.json", *exported) == wanted


@pytest.mark.slow
def test_the_adapters_of_a_run_answer_as_their_export_does(tiny_assets: Path, tmp_path: Path) -> None:
    run_dir, image = tmp_path / "run", tiny_assets / "data" / "images" / "00000_0.png"
    own = ["text.lora.rank=4", "training.frozen=[vision]", "training.max_steps=2", "training.learning_rate=0.01"]
    ended = train(*tiny(tiny_assets, run_dir, *ONE_ACTOR_EACH, *own))
    assert ended.status == 0, ended.stderr
    assert main(["export", str(run_dir), str(tmp_path / "exported")]) == 0
    given = [f"checkpoint={run_dir}", f"images=[{image}]"]
    assert generated(tmp_path / "a.json", *given) == plainly(tmp_path / "exported", image)


@pytest.mark.slow
def test_a_dataset_is_answered_after_one_start(tiny_assets: Path, tmp_path: Path) -> None:
    model, rows = tiny_assets / "model", json.loads((tiny_assets / "data" / "annotations.json").read_text())
    shown = [row for row in rows if "image" in row][:3]
    (tmp_path / "rows.json").write_text(json.dumps(shown))
    (question, answer) = (shown[0]["conversations"][at]["value"] for at in (0, 1))
    entry = f"{{annotation_path: {tmp_path / 'rows.json'}, data_path: {tiny_assets / 'data'}}}"
    given = [f"checkpoint={model}", "--config-name=tiny", *ONE_ACTOR_EACH, f"data.data_registry.own={entry}"]
    out = tmp_path / "new" / "answers.jsonl"
    ended = train("generate", "dataset=own", f"max_new_tokens={NEW}", f"out={out}", *given, module="dhp")
    assert ended.status == 0 and ended.left == (), ended.stderr
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["number"] for line in lines] == [1, 2, 3] and lines[0]["reference"] == answer
    image = tiny_assets / "data" / shown[0]["image"]
    assert lines[0]["answer"] == plainly(model, image, question.replace("<image>", "").strip())
    exact = sum(line["exact"] for line in lines)
    assert f"own: {exact} of 3 answers are exact" in ended.stdout


def test_an_exact_answer_may_differ_in_white_space_around_it() -> None:
    found = AnswerMetrics(step=1, dataset="a", number=2, prompt="p", reference=" A red square.", answer="", tokens=3)
    lines = [
        answer_line(replace(found, answer=said)) for said in ("A red square.\n", "A red  square.", "a red square.")
    ]
    assert [line["exact"] for line in lines] == [True, False, False]
    told = {"number": 2, "prompt": "p", "reference": " A red square.", "answer": "A red square.\n", "tokens": 3}
    assert lines[0] == told | {"exact": True}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["dataset=shape", "out=x.jsonl", "checkpoint={run}"], "shape is not in data.data_registry"),
        (["dataset=shapes", "out=x.jsonl", "checkpoint={run}", "--benchmark"], "--benchmark answers one prompt"),
        (["prompt=x", "checkpoint={model}"], "is a model: name a FILE.yaml or --config-name=NAME"),
        (["prompt=x"], "checkpoint= is not given: name a FILE.yaml or --config-name=NAME"),
        (["prompt=x", "checkpoint=nowhere"], "nowhere is no directory"),
        (["prompt=x", "checkpoint={run}", "text.parallelism=pipeline"], "text.pipeline=2"),
        (["prompt=x", "checkpoint={run}", "text.num_actors=9"], "tensor=9 leaves actors without any"),
        (
            [
                "prompt=x",
                "checkpoint={run}",
                "--config-name=tiny",
                "text.model_name={model}",
                "vision.model_name={model}",
            ],
            "is of another model",
        ),
        (["prompt=x", "checkpoint={run}", "text.lora.rank=3"], "had other adapters"),
        (["prompt=x", "checkpoint={run}", "max_new_tokens=99999"], "99999 new ones are more than the"),
        (["images=[nowhere.png]", "checkpoint={run}"], "nowhere.png does not exist"),
        (["images=[{run}/config.yaml]", "checkpoint={run}"], "config.yaml cannot be decoded"),
        (["videos=[{run}/config.yaml]", "checkpoint={run}"], "config.yaml"),
        (["prompt=a <|image_pad|>", "checkpoint={run}"], "1 image placeholder tokens for 0 images"),
        (["prompt=x", "checkpoint={run}", "out={run}"], "is a directory; name a file in it"),
        (["prompt=x", "checkpoint={run}", "out={run}/config.yaml/a"], "config.yaml is no directory that takes files"),
    ],
)
def test_what_cannot_be_answered_is_refused_before_anything_starts(
    arguments: list[str], told: str, long_run: tuple[Path, Outcome], made_model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, _ = long_run
    given = [one.format(model=made_model, run=run_dir) for one in arguments]
    assert main(["generate", *given]) == 1
    ended = capsys.readouterr()
    assert told in ended.err and "starting Ray" not in ended.out + ended.err
