"""Tiny models, made pictures and needles."""

import json
import os
import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    AutoImageProcessor,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    Qwen2_5_VLForConditionalGeneration,
)

from dhp.__main__ import main
from dhp.batch.reader import make_reader
from dhp.config.command_line import compose_config
from dhp.config.data import DatasetEntry
from dhp.core.errors import DataError, ModelError
from dhp.data.media.frames import FrameSampling
from dhp.data.media.images import open_image
from dhp.data.media.video import map_frames
from dhp.data.sampling.dataset import open_dataset
from dhp.models.registry import FAMILIES as REGISTERED
from dhp.plan.batches import feed_settings
from dhp.tiny import made_pictures
from dhp.tiny import tiny_model as tiny
from dhp.tiny.looks import LOOKS, family_names
from dhp.tiny.made_pictures import (
    NEEDLES,
    PALETTE,
    QUESTION,
    Hidden,
    Needle,
    coloured_needles,
    make_dataset,
    make_needles,
    texts,
    write_needles,
)
from dhp.tiny.tiny_families import FAMILIES
from dhp.tiny.tiny_model import SPECIAL_TOKENS, make_family, make_tiny_model, make_tokenizer
from dhp.trainer.preflight import prepare
from tests.helpers.runs import ONE_ACTOR_EACH

CORPUS = ["What colour is the circle?", "red and blue", "How many shapes are there?"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("made") / "deep" / "tiny", CORPUS, seed=5)


@pytest.fixture(scope="module")
def model(folder):
    return Qwen2_5_VLForConditionalGeneration.from_pretrained(folder).eval()


def read(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_directory_is_an_ordinary_one(folder):
    assert sorted(read(folder)) == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "preprocessor_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    _, info = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info


def test_sizes_suit_every_sharding(model):
    text, vision = model.config.text_config, model.config.vision_config
    assert (text.num_attention_heads, text.num_key_value_heads, text.vocab_size % 4) == (8, 4, 0)
    assert sum(text.rope_parameters["mrope_section"]) == text.hidden_size // text.num_attention_heads // 2
    assert (vision.num_heads, vision.fullatt_block_indexes) == (4, [1, 3])
    assert vision.window_size // vision.patch_size // vision.spatial_merge_size == 2
    assert model.get_output_embeddings().weight is not model.get_input_embeddings().weight


def test_token_ids_agree(folder, model):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    config = model.config
    assert len(tokenizer) < config.text_config.vocab_size
    names = tokenizer.convert_ids_to_tokens(
        [config.image_token_id, config.video_token_id, config.vision_start_token_id, config.vision_end_token_id]
    )
    assert names == ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
    for owner in (model.generation_config, config.text_config):
        ids = [owner.bos_token_id, owner.eos_token_id, owner.pad_token_id]
        assert tokenizer.convert_ids_to_tokens(ids) == ["<|endoftext|>", "<|im_end|>", "<|endoftext|>"]
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    for token in SPECIAL_TOKENS:
        assert tokenizer.decode(tokenizer(token)["input_ids"], skip_special_tokens=True) == ""
        assert len(tokenizer(f"a{token}b")["input_ids"]) == 3


@pytest.mark.parametrize("text", ["What colour is the circle?", "größer 12\n\n\t x", "😀"])
def test_any_text_survives_the_tokenizer(folder, text):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_the_corpus_is_compressed():
    tokenizer = make_tokenizer(CORPUS)
    assert tokenizer.tokenize("What colour is the circle?") == ["What", "Ġcolour", "Ġis", "Ġthe", "Ġcircle", "?"]


def test_the_chat_template():
    tokenizer = make_tokenizer(CORPUS)
    user = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}
    assert tokenizer.apply_chat_template([user], tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>What?<|im_end|>\n<|im_start|>assistant\n"
    )
    plain = [{"role": "system", "content": "Short."}, {"role": "user", "content": "Hi?"}]
    assert tokenizer.apply_chat_template(plain, tokenize=False) == (
        "<|im_start|>system\nShort.<|im_end|>\n<|im_start|>user\nHi?<|im_end|>\n"
    )


def test_plain_transformers_generates_from_it(folder, model):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    picture = AutoImageProcessor.from_pretrained(folder)(images=[Image.new("RGB", (90, 60))], return_tensors="pt")
    assert picture["pixel_values"].shape == (24, 3 * 2 * 14 * 14)
    assert picture["image_grid_thw"].tolist() == [[1, 4, 6]]
    text = "<|vision_start|>" + "<|image_pad|>" * 6 + "<|vision_end|>What?"
    inputs = tokenizer(text, return_tensors="pt")
    kinds = (inputs["input_ids"] == model.config.image_token_id).long()
    output = model.generate(**inputs, **picture, mm_token_type_ids=kinds, max_new_tokens=3, min_new_tokens=3)
    assert output.shape == (1, inputs["input_ids"].shape[1] + 3)


def test_the_seed_decides_the_weights_and_leaves_the_callers_alone(folder, tmp_path):
    torch.manual_seed(1)
    again = make_tiny_model(tmp_path / "again", CORPUS, seed=5)
    drawn = torch.rand(1)
    torch.manual_seed(1)
    assert torch.equal(drawn, torch.rand(1))
    assert read(again) == read(folder)
    other = make_tiny_model(tmp_path / "other", CORPUS, seed=6)
    assert read(other)["model.safetensors"] != read(folder)["model.safetensors"]


def test_a_made_model_is_left_alone_and_anything_else_refused(folder, tmp_path):
    before = read(folder)
    assert make_tiny_model(folder, ["other"], seed=9) == folder
    assert read(folder) == before
    with pytest.raises(ModelError, match=f"{tmp_path} exists but holds no model"):
        make_tiny_model(tmp_path, CORPUS)


def test_an_interrupted_run_leaves_nothing(tmp_path, monkeypatch):
    def stop(tokenizer):
        raise KeyboardInterrupt

    monkeypatch.setattr(tiny, "tiny_config", stop)
    with pytest.raises(KeyboardInterrupt):
        make_tiny_model(tmp_path / "tiny", CORPUS)
    assert list(tmp_path.iterdir()) == []


def test_two_makers_at_once_end_with_one_model(tmp_path, monkeypatch):
    rename = os.rename

    def late(source, destination):
        monkeypatch.setattr(os, "rename", rename)
        make_tiny_model(tmp_path / "tiny", CORPUS)  # the other maker finishes first
        rename(source, destination)

    monkeypatch.setattr(os, "rename", late)
    make_tiny_model(tmp_path / "tiny", CORPUS)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]
    assert json.loads((tmp_path / "tiny" / "config.json").read_text())["model_type"] == "qwen2_5_vl"


QUICK = ("llava", "internvl", "qwen2_5_vl")  # in every run of the tests; the others with `-m families`


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("data") / "shapes", samples=16)


def read_dataset(model: Path, data: Path) -> dict[str, torch.Tensor]:
    """The first step of a run of it, as the plain model's arguments."""
    shapes = {"annotation_path": data / "annotations.json", "data_path": data}
    own = [f"data.data_registry.shapes.{key}={value}" for key, value in shapes.items()]
    own += [f"{part}.model_name={model}" for part in ("vision", "text")] + ["tiny_assets=null", "cluster.device=cpu"]
    sizes = ["training.batch_size=8", "training.micro_batch_size=8"]
    config = compose_config("tiny", None, [*ONE_ACTOR_EACH, *own, *sizes])
    tensors = make_reader(feed_settings(prepare(config, new_run=False))).model_inputs(0)
    return {name.rpartition("/")[2]: tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.families) for name in family_names()]
)
def test_the_plain_model_takes_what_dhp_reads_for_it(name: str, data: Path, tmp_path: Path) -> None:
    model, info = AutoModelForImageTextToText.from_pretrained(
        make_family(name, tmp_path / "made"), output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    named = read_dataset(tmp_path / "made", data)
    assert sum(parameter.numel() for parameter in model.parameters()) < 1_000_000
    with warnings.catch_warnings():  # libraries' own
        warnings.simplefilter("ignore")
        loss = model(**named, use_cache=False).loss
        loss.backward()
    assert 2 < float(loss.detach()) < 60
    assert any(p.grad is not None and p.grad.any() for n, p in model.named_parameters() if "vis" in n)


def test_every_declared_family_has_a_look() -> None:
    assert set(LOOKS) == {model_type for model_type, _ in FAMILIES.values()} >= set(REGISTERED)
    assert set(family_names()) == {name for name, look in LOOKS.items() if look.needs is None}


def test_the_same_seed_gives_the_same_files(tmp_path: Path) -> None:
    first, again, other = (make_family("llava", tmp_path / str(n), seed) for n, seed in enumerate((0, 0, 1)))
    contents = [{file.name: file.read_bytes() for file in folder.iterdir()} for folder in (first, again, other)]
    assert contents[0] == contents[1] and contents[0] != contents[2]


def test_the_librarys_processor_reads_it(tmp_path: Path) -> None:
    processor = AutoProcessor.from_pretrained(make_family("llava", tmp_path / "made"))
    assert type(processor).__name__ == "LlavaProcessor" and processor.num_additional_image_tokens == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--make", "lava", "out=made"], "lava is no declared family; did you mean llava?\n  those that can be made"),
        (["--make", "mistral3", "out=made"], "mistral3: its processor needs torchvision"),
        (["--make", "llava", "made"], "name it by out=DIR in the place of made"),
        (["--make", "llava", "out=there"], "there exists; name a new directory"),
    ],
)  # fmt: skip
def test_the_command_says_what_is_wrong(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    assert main(["doctor", "model", *arguments]) == 1
    assert message in capsys.readouterr().err and [one.name for one in tmp_path.iterdir()] == ["there"]


def test_the_command_writes_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "model", "--make", "llava", f"out={tmp_path / 'made'}"]) == 0
    assert "made: a tiny llava with random weights" in capsys.readouterr().out
    with pytest.raises(ModelError, match="exists"):
        make_family("llava", tmp_path / "made")


@pytest.fixture(scope="module")
def pictures_folder(tmp_path_factory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("made") / "shapes", samples=64, seed=3)


@pytest.fixture(scope="module")
def records(pictures_folder):
    entry = DatasetEntry(annotation_path=str(pictures_folder / "annotations.json"), data_path=str(pictures_folder))
    dataset = open_dataset(["shapes"], {"shapes": entry})
    return [dataset.record(index) for index in range(len(dataset))]


def files(pictures_folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(pictures_folder)): path.read_bytes()
        for path in sorted(pictures_folder.rglob("*"))
        if path.is_file()
    }


def test_the_mix_of_samples(records):
    assert Counter(len(record.images) for record in records) == {0: 8, 1: 48, 2: 8}
    assert Counter(len(record.turns) > 2 for record in records) == {False: 56, True: 8}


def test_pictures_are_real_files_of_many_sizes(records):
    paths = [path for record in records for path in record.images]
    assert {path.suffix for path in paths} == {".jpg", ".png"}
    formats = set()
    for path in paths:
        with Image.open(path) as image:
            formats.add(image.format)
    assert formats == {"JPEG", "PNG"}
    sizes = {open_image(path).size for path in paths}
    assert len(sizes) > 40
    assert all(56 <= side <= 168 for size in sizes for side in size)


def test_one_question_has_many_answers(records):
    """So that no answer can be known without its picture."""
    answers: dict[str, set[str]] = {}
    for record in records:
        for question, answer in zip(record.turns[::2], record.turns[1::2]):
            answers.setdefault(question.parts[-1], set()).add(answer.parts[0])
    for question in ("Which digit is this?", "How many shapes are there?", "Which bar is the tallest?"):
        assert len(answers[question]) >= 3
    assert max(len(answer.split()) for several in answers.values() for answer in several) <= 3


def test_the_colour_of_the_answer_is_in_the_picture(records):
    for record in records[0::8]:  # "What colour is the …?"
        image = open_image(record.images[0])
        wanted = PALETTE[record.turns[1].parts[0]]
        close = [all(abs(a - b) < 12 for a, b in zip(pixel, wanted)) for _, pixel in image.getcolors(1 << 20)]
        assert any(close)


def test_the_same_arguments_give_the_same_files(pictures_folder, tmp_path):
    assert files(make_dataset(tmp_path / "a" / "again", samples=64, seed=3)) == files(pictures_folder)
    other = files(make_dataset(tmp_path / "other", samples=64, seed=4))
    assert other["annotations.json"] != files(pictures_folder)["annotations.json"]


def test_a_made_folder_is_left_alone(pictures_folder):
    before = {path: path.stat().st_mtime_ns for path in pictures_folder.rglob("*")}
    assert make_dataset(pictures_folder, samples=64, seed=3) == pictures_folder
    assert {path: path.stat().st_mtime_ns for path in pictures_folder.rglob("*")} == before


def test_another_recipe_in_the_folder_is_an_error(pictures_folder, tmp_path):
    with pytest.raises(DataError, match=r"was not made with .*'samples': 65.*Remove it"):
        make_dataset(pictures_folder, samples=65, seed=3)
    with pytest.raises(DataError, match=r"it says None"):
        make_dataset(tmp_path, samples=8)


def test_an_interrupted_run_leaves_no_picture(tmp_path, monkeypatch):
    def stop(random):
        raise KeyboardInterrupt

    monkeypatch.setattr(made_pictures, "KINDS", (made_pictures.KINDS[0], stop))
    with pytest.raises(KeyboardInterrupt):
        make_dataset(tmp_path / "shapes", samples=4)
    assert list(tmp_path.iterdir()) == []


def test_two_makers_at_once_end_with_one_dataset(tmp_path, monkeypatch):
    target = tmp_path / "shapes"
    rename = os.rename

    def late(source, destination):
        monkeypatch.setattr(os, "rename", rename)
        make_dataset(target, samples=8)  # the other maker finishes first
        rename(source, destination)

    monkeypatch.setattr(os, "rename", late)
    assert make_dataset(target, samples=8) == target
    assert [path.name for path in tmp_path.iterdir()] == ["shapes"]


def test_texts_are_all_questions_and_answers(pictures_folder):
    annotations = json.loads((pictures_folder / "annotations.json").read_text())
    assert len(texts(pictures_folder)) == sum(len(sample["conversations"]) for sample in annotations)
    assert "Which digit is this?" in [text.removeprefix("<image>\n") for text in texts(pictures_folder)]


def frames_of(path: Path) -> list[np.ndarray]:
    return map_frames(path, FrameSampling(2.0, 1000, 1), lambda group: np.asarray(group[0]).astype(int))[0]


def coloured(frame: np.ndarray) -> bool:
    """Grey frames have three equal channels, but for what the codec makes of them."""
    return float((frame.max(-1) - frame.min(-1)).mean()) > 60


@pytest.mark.parametrize(
    ("frames", "depth", "lasts", "first"),
    [(12, 0.0, 2, 0), (12, 1.0, 2, 10), (12, 0.5, 2, 4), (4, 0.4, 2, 0), (12, 0.5, 6, 4), (12, 1.0, 6, 6)],
)
def test_a_needle_fills_steps_in_time(tmp_path: Path, frames: int, depth: float, lasts: int, first: int) -> None:
    needle = next(one for one in coloured_needles() if one.answer == "green")
    path = write_needles(tmp_path, [Hidden(needle, frames, depth, 3, lasts)])
    seen = frames_of(tmp_path / "00000.mp4")
    assert len(seen) == frames
    assert [number for number, frame in enumerate(seen) if coloured(frame)] == list(range(first, first + lasts))
    assert np.allclose(seen[first].mean((0, 1)), PALETTE["green"], atol=6)
    (line,) = map(json.loads, path.read_text().splitlines())
    assert [turn["content"] for turn in line["messages"]] == [f"<video>{QUESTION}", "green"]
    assert line["videos"] == ["00000.mp4"] and path.name == NEEDLES


def test_a_needle_of_ones_own_in_a_video_of_ones_own(tmp_path: Path) -> None:
    dark = Needle(Image.new("RGB", (30, 20), (0, 0, 0)), "What is odd?", "night")
    write_needles(tmp_path / "hay", [Hidden(dark, 16, 0.0, 1)])
    hay = tmp_path / "hay" / "00000.mp4"
    red = Needle(Image.new("RGB", (30, 20), PALETTE["red"]), "Which?", "red")
    write_needles(tmp_path / "own", [Hidden(red, 8, 1.0, 0)], hay)
    seen = frames_of(tmp_path / "own" / "00000.mp4")
    assert [coloured(frame) for frame in seen] == [False] * 6 + [True] * 2
    taken = frames_of(hay)[::2]
    assert all(np.abs(mine - theirs).mean() < 8 for mine, theirs in zip(seen[:6], taken, strict=False))
    with pytest.raises(DataError, match=r"00000.mp4 has 16 frames, and a haystack of 18 is asked for"):
        write_needles(tmp_path / "long", [Hidden(red, 18, 0.0, 0)], hay)


def test_a_dataset_is_made_once_and_alike(tmp_path: Path) -> None:
    one, other = (make_needles(tmp_path / name, 5, (4, 6), seed=7) for name in ("a", "b"))
    assert (one / NEEDLES).read_text() == (other / NEEDLES).read_text()
    assert {len(frames_of(one / f"{number:05d}.mp4")) for number in range(5)} <= {4, 6}
    (one / "kept").touch()
    make_needles(one, 5, (4, 6), seed=7)
    assert (one / "kept").is_file()
