"""The known name that a mistyped one most likely meant."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import SequenceMatcher

_SIMILAR = 0.75  # at difflib's own 0.6, `seed` is close to `deepspeed` and `max_steps` to `eval_steps`


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The name in `known` most like `name`, or None when none resembles it. Ties: the first one.

    A name of several words resembles some of them too: `path` means `data_path`.
    """
    scored = [(_similarity(name, one), one) for one in known if _resembles(name, one)]
    return max(scored, key=lambda pair: pair[0], default=(0.0, None))[1]


def nearest_key(key: str, known: Iterable[str]) -> list[str]:
    """Dotted keys that `key` may have meant, several where the section does not distinguish them.

    The last name decides: an equal one anywhere, else a similar one in the same section, else a similar one
    anywhere.
    """
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
