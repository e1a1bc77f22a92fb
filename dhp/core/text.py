"""Text for people: tables, numbers, safe strings, suggested names."""

import math
import re
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any


def aligned(rows: Sequence[Sequence[str]], left: int) -> list[str]:
    """A line a row, columns as wide as their widest cell: the first `left` of them flush left, the others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(_padded(row, widths, left)).rstrip() for row in rows]


def _padded(row: Sequence[str], widths: Sequence[int], left: int) -> list[str]:
    cells = enumerate(zip(row, widths, strict=True))
    return [cell.ljust(width) if at < left else cell.rjust(width) for at, (cell, width) in cells]


def json_safe(value: Any) -> Any:
    """The value with every number that JSON has no word for as "NaN", "Infinity" or "-Infinity".

    Those are the strings of protobuf's JSON mapping: null keeps its meaning of "not known"."""
    if isinstance(value, Mapping):
        return {key: json_safe(inner) for key, inner in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return [json_safe(inner) for inner in value] if isinstance(value, list | tuple) else value


def from_json(value: Any) -> Any:
    """The inverse of `json_safe`. Other text stays text."""
    if isinstance(value, dict):
        return {key: from_json(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [from_json(inner) for inner in value]
    return float(value) if value in ("NaN", "Infinity", "-Infinity") else value


def shown(value: float | None, spec: str) -> str:
    """The number in that format, or `-` when it is not known."""
    return "-" if value is None else format(value, spec)


# What would steer a terminal, turn the direction of text, or cannot be written.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def harmless(text: str) -> str:
    """Text with control characters escaped, except line ends and tabs."""
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


def one_line(text: str) -> str:
    """As `harmless`, with line ends escaped as well: the text cannot fake another line."""
    return harmless(text).replace("\n", "\\n").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


_NAME, _TRAINING = "dhp", "train"


def shell_command(*words: str) -> list[str]:
    """The words of a shell command that runs dhp's command `words[0]` with the others as its arguments.

    They can be pasted: `dhp …` where a shell finds the console command of the Python that runs this process, its path
    where that was called by its path, else `python -m dhp …`, and `python -m dhp.train_ray …` for `train`."""
    if _has_console_command():
        return [_NAME, *words]
    if Path(sys.argv[0]).name == _NAME and Path(sys.argv[0]).is_file():
        return [sys.argv[0], *words]
    if words[:1] == (_TRAINING,):
        return ["python", "-m", "dhp.train_ray", *words[1:]]
    return ["python", "-m", _NAME, *words]


def _has_console_command() -> bool:
    found = shutil.which(_NAME)
    return found is not None and Path(found).parent.resolve() == Path(sys.executable).parent.resolve()


_SIMILAR = 0.75  # at difflib's own 0.6, `seed` is close to `deepspeed` and `max_steps` to `eval_steps`


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The name in `known` most like `name`, or None when none resembles it. Ties: the first one.

    A name of several words resembles some of them too: `path` means `data_path`."""
    scored = [(_similarity(name, one), one) for one in known if _resembles(name, one)]
    return max(scored, key=lambda pair: pair[0], default=(0.0, None))[1]


def nearest_key(key: str, known: Iterable[str]) -> list[str]:
    """Dotted keys that `key` may have meant, several where the section does not distinguish them.

    The last name decides: an equal one anywhere, else a similar one in the same section, else a similar one
    anywhere."""
    section, leaf = _split(key)
    leaves: dict[str, list[str]] = {}
    for candidate in known:
        leaves.setdefault(_split(candidate)[1], []).append(candidate)
    beside = [name for name, paths in leaves.items() if any(_split(path)[0] == section for path in paths)]
    meant = leaf if leaf in leaves else nearest(leaf, beside) or nearest(leaf, leaves)
    candidates = leaves.get(meant, []) if meant else []
    similar = [path for path in candidates if _similarity(section, _split(path)[0]) >= _SIMILAR]
    plain = [path for path in candidates if "<" not in path]  # a name of the user's choice is seldom left out
    return similar or plain or candidates


def did_you_mean(names: Iterable[str | None]) -> str:
    """`; did you mean a or b?`, or nothing when there is no suggestion."""
    suggestions = [name for name in names if name]
    return f"; did you mean {' or '.join(suggestions)}?" if suggestions else ""


def _resembles(name: str, candidate: str) -> bool:
    words, of_candidate = ({*text.lower().split("_")} for text in (name, candidate))
    return words <= of_candidate or _similarity(name, candidate) >= _SIMILAR


def _similarity(left: str, right: str) -> float:
    return SequenceMatcher(None, left.lower(), right.lower()).ratio()


def _split(key: str) -> tuple[str, str]:
    section, _, leaf = key.rpartition(".")
    return section, leaf


def binary_size(count: float) -> str:
    """`65.3 GiB`, below one `12.3 MiB`."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
