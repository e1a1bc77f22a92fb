"""Shows a sample as its model sees it, as HTML."""

import base64
import io
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np
from PIL import Image

from dhp.core.batch import IGNORED
from dhp.core.preferences import OTHER
from dhp.core.text import harmless
from dhp.data.media.images import open_image
from dhp.data.media.sources import File, Video, files_of, name_of
from dhp.data.read.records import Record
from dhp.data.sample.sample import Sample
from dhp.models.processor import Processor

KINDS = ("text", "images", "videos", "sound")  # by mm_token_type_ids
GREEN, CYAN, PLAIN = "\x1b[1;32m", "\x1b[36m", "\x1b[0m"


@dataclass(frozen=True)
class TextRun:
    """Tokens one behind another that are alike. kind: index in KINDS; of a placeholder, `text` is that of one token."""

    text: str
    tokens: int
    kind: int
    learned: bool

    @property
    def shown(self) -> str:
        """The text, and of placeholders their number instead of all of them."""
        return harmless(self.text) if self.kind == 0 else f"{harmless(self.text)} × {self.tokens}"


def runs_of(sample: Sample, tokenizer: Any) -> list[TextRun]:
    """The whole sample, in order."""
    ids, kinds = sample.input_ids, sample.mm_token_type_ids
    learned = sample.labels != IGNORED
    learned[0] = False  # nothing predicts the first token
    learned &= _learns(sample)
    placeholder = np.where(kinds > 0, ids, -1)  # runs of text may be of any tokens
    cuts = np.flatnonzero((np.diff(placeholder) != 0) | (np.diff(kinds) != 0) | (np.diff(learned.astype(int)) != 0)) + 1
    bounds = [0, *cuts.tolist(), len(ids)]
    runs = []
    for start, stop in zip(bounds, bounds[1:]):
        kind = int(kinds[start])
        text = tokenizer.convert_ids_to_tokens(int(ids[start])) if kind else _text(tokenizer, ids, start, stop)
        runs.append(TextRun(text, stop - start, kind, bool(learned[start])))
    return runs


def sides_of(record: Record, sample: Sample) -> list[tuple[str, Record, Sample]]:
    """The sample; of a preference both sides, each with its heading."""
    if sample.sides is None or record.other is None:
        return [("", record, sample)]
    names = {None: ("chosen", "rejected"), True: ("liked", "not learned: an answer to another prompt")}
    names[False] = ("not liked", names[True][1])
    first, second = (f"\n— {name} —\n" for name in names[record.liked])
    return [(first, record, sample.sides[0]), (second, record.other, sample.sides[1])]


def _text(tokenizer: Any, ids: np.ndarray, start: int, stop: int) -> str:
    """The text that these tokens add to that before them: alone, some tokenizers drop the space in front of a word."""
    before = max(0, start - 8)  # enough for any character, and a picture's placeholders are not decoded again
    left, whole = (tokenizer.decode(ids[before:end].tolist()) for end in (start, stop))
    return whole[len(left) :] if whole.startswith(left) else tokenizer.decode(ids[start:stop].tolist())


def as_terminal(runs: Sequence[TextRun], colours: bool) -> str:
    """The prompt: learned text green or in ⟦ ⟧, placeholders cyan or in ⟨ ⟩."""
    parts = []
    for run in runs:
        shown = run.shown
        if run.kind:
            shown = f"{CYAN}{shown}{PLAIN}" if colours else f"⟨{shown}⟩"
        if run.learned:
            # Each line on its own: pagers reset colours at its end.
            shown = "\n".join(f"{GREEN}{line}{PLAIN}" for line in shown.split("\n")) if colours else f"⟦{shown}⟧"
        parts.append(shown)
    return "".join(parts)


def placeholders(runs: Sequence[TextRun]) -> list[str]:
    """`<image> × 256 in 2 runs`, one for each placeholder."""
    tokens: Counter[str] = Counter()
    times: Counter[str] = Counter()
    for run in runs:
        if run.kind:
            tokens[harmless(run.text)] += run.tokens
            times[harmless(run.text)] += 1
    return [f"{name} × {tokens[name]} in {count} run{'s' * (count > 1)}" for name, count in times.items()]


def lengths(sample: Sample) -> dict[str, int]:
    """Tokens by kind, of all together, and those that are learned."""
    counts = np.bincount(sample.mm_token_type_ids, minlength=len(KINDS)).tolist()
    learned = sum(one.target_tokens for one in sample.sides or (sample,) if _learns(one))
    return dict(zip(KINDS, counts)) | {"together": len(sample.input_ids), "learned": learned}


def _learns(sample: Sample) -> bool:
    """Whether it is no answer to another prompt, which kto compares with."""
    return sample.mark is None or sample.mark.side != OTHER


SHOWN_FRAMES = 16  # of a video, evenly
_UNREAD = "this family's patches cannot be put together again here"
ALIKE = 0.3  # of the contrast: how much ways to scale may differ
ROUNDING = 2.0  # levels of 255


@dataclass(frozen=True)
class Shown:
    """One picture, video or clip. images: what is drawn of it; caption: what it is, and what of it is drawn."""

    caption: str
    images: tuple[Image.Image, ...]


def pictures_of(record: Record, sample: Sample, processor: Processor, image_processor: Any) -> list[Shown]:
    """Images and videos in order. Where pixels cannot be put together, the picture is the file's own, and the caption
    says so."""
    shown = []
    parts = zip(record.media, sample.pixels, sample.grids, strict=True)
    for number, (part, pixels, grid) in enumerate(parts, start=1):
        moving = isinstance(part, Video)
        name = part.file if isinstance(part, Video) else files_of(part)[0]
        assert isinstance(pixels, np.ndarray)
        frames = processor.frames(pixels, grid, moving)
        images = [] if frames is None else [_as_image(frame, image_processor) for frame in frames]
        tokens = processor.image_tokens(grid)
        head = f"{'video' if moving else 'image'} {number}: {name_of(name)}, {tokens} tokens"
        shown.append(
            _video(head, images) if moving else _image(head, images, files_of(part)[0], processor.from_patches(grid))
        )
    return shown


def _scale(seen: Image.Image, original: Image.Image) -> str:
    """By what boxes in pixels of the file would be multiplied."""
    if seen.size == original.size:
        return ""
    across, down = seen.width / original.width, seen.height / original.height
    return f" (scaled by {across:.3f} across, {down:.3f} down)"


def clips_of(record: Record, sample: Sample) -> list[Shown]:
    """Clips of sound, as pictures of their spectra: time to the right, pitch upwards."""
    shown = []
    parts = zip(record.sounds, sample.clips, sample.clip_forms, strict=True)
    for number, (file, features, form) in enumerate(parts, start=1):
        head = f"sound {number}: {name_of(file)}, {form.tokens} tokens"
        caption = f"{head}; {features.shape[0]} frames of {features.shape[1]} bins"
        shown.append(Shown(caption, (_spectrum(features),)))
    return shown


def _image(head: str, images: Sequence[Image.Image], file: File, from_patches: bool) -> Shown:
    original = open_image(file)
    head = f"{head}; {original.width} × {original.height} pixels"
    if len(images) > 1:
        return Shown(f"{head}, which the model sees as {len(images)} of {_size(images[0])}", tuple(images))
    if not images:
        return Shown(f"{head}. Drawn as the file has it: {_UNREAD}", (original,))
    if not from_patches or _alike(images[0], original):
        return Shown(f"{head}, which the model sees as {_size(images[0])}{_scale(images[0], original)}", tuple(images))
    scaled = original.resize(images[0].size, Image.Resampling.BICUBIC)
    return Shown(
        f"{head}, which the model sees as {_size(scaled)}. Scaled here by Pillow, because {_UNREAD}", (scaled,)
    )


def _video(head: str, images: Sequence[Image.Image]) -> Shown:
    if not images:
        return Shown(f"{head}. Its frames cannot be read back from this family's patches", ())
    chosen = np.unique(np.linspace(0, len(images) - 1, SHOWN_FRAMES).round().astype(int))
    which = f"frames {', '.join(str(number + 1) for number in chosen)} of {len(images)}"
    return Shown(
        f"{head}; {len(images)} frames that the model sees as {_size(images[0])}; here {which}",
        tuple(images[number] for number in chosen),
    )


def _as_image(frame: np.ndarray, image_processor: Any) -> Image.Image:
    """frame: float32 [height, width, channels], as the image processor normalised it."""
    values = frame
    if getattr(image_processor, "do_normalize", True):
        mean, std = (np.array(getattr(image_processor, name), dtype=np.float32) for name in ("image_mean", "image_std"))
        values = values * std + mean
    if getattr(image_processor, "do_rescale", True):
        values = values / image_processor.rescale_factor
    levels = np.clip(np.rint(values), 0, 255).astype(np.uint8)
    return Image.fromarray(levels[:, :, 0] if levels.shape[2] == 1 else levels).convert("RGB")


def _alike(seen: Image.Image, original: Image.Image) -> bool:
    """Whether it is the picture that it should be. Ways to scale differ a little where a picture has much detail;
    patches in another order differ as much as the picture's own levels do."""
    scaled = np.asarray(original.resize(seen.size, Image.Resampling.BICUBIC), dtype=np.float32)
    apart = np.abs(np.asarray(seen, dtype=np.float32) - scaled).mean()
    contrast = np.abs(scaled - scaled.mean(axis=(0, 1))).mean()
    return bool(apart < ROUNDING + ALIKE * contrast)


def _spectrum(features: np.ndarray) -> Image.Image:
    low, high = float(features.min()), float(features.max())
    levels = (features - low) / max(high - low, 1e-6) * 255
    return Image.fromarray(levels.T[::-1].astype(np.uint8))


def _size(image: Image.Image) -> str:
    return f"{image.width} × {image.height}"


_STYLE = """\
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 60em; padding: 0 1em; color: #222; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: #f6f6f6; padding: 1em; border-radius: 6px; }
.learned { background: #c9efc9; }
.place { background: #d5e3f7; border-radius: 4px; padding: 0 4px; }
table { border-collapse: collapse; }
td, th { padding: 2px 12px; text-align: right; border-bottom: 1px solid #ddd; }
figure { margin: 1.5em 0; }
figure img { max-width: 100%; image-rendering: pixelated; border: 1px solid #ccc; margin: 0 6px 6px 0; }
figcaption { color: #555; }
"""
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def sample_page(
    title: str, runs: Sequence[TextRun], counts: Mapping[str, int], notes: Sequence[str], shown: Sequence[Shown]
) -> str:
    """The page. notes: lines below the prompt. All text is escaped."""
    head = "".join(f"<th>{escape(name)}</th>" for name in counts)
    row = "".join(f"<td>{count}</td>" for count in counts.values())
    return (
        f'<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f"<title>{_safe(title)}</title>\n<style>\n{_STYLE}</style></head>\n<body>\n<h1>{_safe(title)}</h1>\n"
        '<p><span class="learned">learned</span> · <span class="place">placeholder × tokens</span> · the rest is read '
        f"alone</p>\n<pre>{''.join(map(_run, runs))}</pre>\n"
        + "".join(f"<p>{_safe(note)}</p>\n" for note in notes)
        + f"<h2>Tokens</h2>\n<table><tr>{head}</tr><tr>{row}</tr></table>\n"
        + ("<h2>As the model gets them</h2>\n" if shown else "")
        + "".join(map(_figure, shown))
        + "</body>\n</html>\n"
    )


def _run(run: TextRun) -> str:
    kinds = ["learned"] * run.learned + ["place"] * (run.kind > 0)
    text = escape(run.shown)
    return f'<span class="{" ".join(kinds)}">{text}</span>' if kinds else text


def _figure(shown: Shown) -> str:
    images = "".join(f'<img src="{_address(image)}" alt="">' for image in shown.images)
    return f"<figure>{images}<figcaption>{_safe(shown.caption)}</figcaption></figure>\n"


def _address(image: Image.Image) -> str:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _safe(text: str) -> str:
    return escape(harmless(text))
