"""What becomes of a row on the way that training takes: read from a file, parsed, and made a sample."""

import base64
import copy
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import av
import numpy as np
from PIL import Image

from dhp.config.data import DatasetEntry
from dhp.core.batch import IGNORED
from dhp.core.errors import DataError
from dhp.data.media.sources import Blob, SizedImage, Sound, Video
from dhp.data.read.records import Record
from dhp.data.sample.sample import Sample
from dhp.data.sample.tokens import refuse_sound
from dhp.data.sampling.dataset import open_dataset
from tests.data.rows.row import COLOURS, Row, picture
from tests.data.sample.made import make_preprocessor

SYSTEM = "system: You are a helpful assistant."  # of the template, where a row has none
_SHOWN = re.compile(r"<([\w-]+)( video| sound)?>")
_MEAN, _STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
# A template that writes what was reasoned, as those of reasoning models do.
_THOUGHTS = (
    "{{ '<|im_start|>' + message['role'] + '\\n' }}",
    "{{ '<|im_start|>' + message['role'] + '\\n' }}{%- if message['reasoning_content'] -%}"
    "{{ '<think>\\n' + message['reasoning_content'] + '\\n</think>\\n\\n' }}{%- endif -%}",
)


def make_media(folder: Path) -> None:
    """Pictures, videos and sounds, each of one colour but for red-blue.mp4, whose second half is blue."""
    folder.mkdir(parents=True, exist_ok=True)
    for colour in COLOURS:
        (folder / f"{colour}.png").write_bytes(picture(colour))
        _write_video(folder / f"{colour}.mp4", [colour] * 8)
    (folder / "large.png").write_bytes(picture("green", 168))
    _write_video(folder / "large.mp4", ["green"] * 8, 112)
    _write_video(folder / "red-blue.mp4", ["red"] * 4 + ["blue"] * 4)
    for name in "ab":
        (folder / f"{name}.wav").write_bytes(b"RIFF" + name.encode())


@dataclass(frozen=True)
class Readers:
    """What makes samples, by whether the template writes what was reasoned: (tokenizer, preprocessor)."""

    plain: tuple[Any, Any]
    thinking: tuple[Any, Any]


def make_readers(tokenizer: Any) -> Readers:
    """With the tokenizer's template, and with the same that writes reasoning_content."""
    thinking = copy.deepcopy(tokenizer)
    assert _THOUGHTS[0] in tokenizer.chat_template
    thinking.chat_template = tokenizer.chat_template.replace(*_THOUGHTS)
    return Readers((tokenizer, make_preprocessor(tokenizer)), (thinking, make_preprocessor(thinking)))


def read(row: Row, folder: Path, preprocess: Any) -> tuple[Record, Sample | None]:
    """The record of a row, and its sample unless it is for a model that hears. Raises DataError where it is refused.

    folder: that `make_media` filled."""
    dataset = open_dataset(
        ["rows"], {"rows": DatasetEntry(str(_write(row, folder)), str(folder), row.form, columns=row.columns)}
    )
    record = dataset.record(0)
    if row.hears:
        return record, None
    refuse_sound(record)
    return record, preprocess(record)


def said_by(record: Record) -> tuple[str, ...]:
    """The turns of a record in the words of `Row.says`, files by their names."""
    return tuple(f"{turn.role}: " + "".join(map(_name, turn.parts)) for turn in record.turns)


def difference(row: Row, sample: Sample, tokenizer: Any) -> str:
    """What of a sample is not as the row says; empty: all is."""
    says = row.says if row.says[0].startswith("system: ") else (SYSTEM, *row.says)
    turns = [one.partition(": ")[::2] for one in says]
    plain = [(role, _SHOWN.sub(_placeholder, said)) for role, said in turns]
    as_written = "".join(
        f"<|im_start|>{role.replace('unlearned', 'assistant')}\n{said}<|im_end|>\n" for role, said in plain
    )
    text = re.sub(r"(<\|(?:image|video)_pad\|>)+", r"\1", tokenizer.decode(sample.input_ids))
    if text != as_written:
        return f"text {text!r} is not {as_written!r}"
    learned = [f"{said}<|im_end|>" for role, said in plain if role == "assistant"]
    if _learned(sample, tokenizer) != learned:
        return f"learned is {_learned(sample, tokenizer)}, not {learned}"
    wanted = [name for _, said in turns for name, _ in _SHOWN.findall(said) if name.split("-")[0] in COLOURS]
    if _colours(sample) != wanted:
        return f"pictures are {_colours(sample)}, not {wanted}"
    if row.grids and sample.grids != row.grids:
        return f"grids are {sample.grids}, not {row.grids}"
    return ""


def verdict(row: Row, folder: Path, readers: Readers) -> tuple[str, str]:
    """read, refused or silent, and the words of the refusal, or what is wrong: a row that is accepted and is not what
    it says is silent, and so counts one that is refused in other words."""
    tokenizer, preprocess = readers.thinking if row.thinks else readers.plain
    try:
        record, sample = read(row, folder, preprocess)
    except DataError as error:
        if row.refused and re.search(row.refused, str(error), re.DOTALL):
            return "refused", str(error)
        return "silent", f"refused in other words: {error}"
    if row.refused:
        return "silent", "accepted"
    if sample is None:
        wrong = "" if said_by(record) == row.says else f"{said_by(record)} is not {row.says}"
    else:
        wrong = difference(row, sample, tokenizer)
    if record.unread != row.unread:
        wrong = wrong or f"not read are {record.unread}, not {row.unread}"
    return ("silent", wrong) if wrong else ("read", "")


def _write(row: Row, folder: Path) -> Path:
    path = folder / row.file
    if isinstance(row.raw, str):
        path.write_text(row.raw, encoding="utf-8")
    elif path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row.raw]), path)
    else:
        sound = base64.b64encode((folder / "a.wav").read_bytes()).decode()
        line = json.dumps(row.raw).replace("{folder}", str(folder)).replace("{a.wav}", sound)
        path.write_text(line + "\n", encoding="utf-8")
    return path


def _name(part: Any) -> str:
    if isinstance(part, str):
        return part
    file = part.file if isinstance(part, Video | Sound | SizedImage) else part
    name = file.content[4:].decode() if isinstance(file, Blob) else file.stem
    return f"<{name}{' sound' if isinstance(part, Sound) else ' video' if isinstance(part, Video) else ''}>"


def _placeholder(found: re.Match[str]) -> str:
    if found[1].split("-")[0] not in COLOURS:
        return found[0]
    return f"<|vision_start|><|{'video' if found[2] else 'image'}_pad|><|vision_end|>"


def _learned(sample: Sample, tokenizer: Any) -> list[str]:
    """The text of each run of targets."""
    target = sample.labels != IGNORED
    edges = np.flatnonzero(np.diff(np.concatenate([[0], target, [0]])))
    return [tokenizer.decode(sample.input_ids[start:stop]) for start, stop in edges.reshape(-1, 2)]


def _colours(sample: Sample) -> list[str]:
    """Of each picture; of a video whose first and last step differ, both."""
    found = []
    for pixels, grid in zip(sample.pixels, sample.grids, strict=True):
        steps = pixels.reshape(grid[0], -1, 3, pixels.shape[1] // 3).mean(axis=(1, 3)) * _STD + _MEAN
        names = [
            min(COLOURS, key=lambda name: np.abs(step * 255 - COLOURS[name]).sum()) for step in (steps[0], steps[-1])
        ]
        found.append("-".join(dict.fromkeys(names)))
    return found


def _write_video(path: Path, colours: list[str], size: int = 56) -> None:
    """A video of a frame a colour, four a second."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=4)
        stream.width, stream.height, stream.pix_fmt = size, size, "yuv420p"
        for colour in colours:
            container.mux(stream.encode(av.VideoFrame.from_image(Image.new("RGB", (size, size), COLOURS[colour]))))
        container.mux(stream.encode())
