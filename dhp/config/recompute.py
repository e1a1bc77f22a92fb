"""Parses `vision.recompute` and `text.recompute`: none, full, auto, or which layers recompute what."""

import re
from collections.abc import Sequence

from dhp.config.part import PartConfig
from dhp.config.ranges import require_positive
from dhp.config.suggestions import did_you_mean, nearest
from dhp.core.errors import ConfigError

# What a layer recomputes in backward, from nothing to everything; each recomputes what the one before does, and more:
# light, what costs no matrix product (norms, rotary positions, activation functions); mlp, the products before the
# activation function; linear, all but the attention itself; all, the whole layer; offload, the same, with what enters
# the layer in host memory.
OFFLOAD = "offload"
CHOICES = ("none", "light", "mlp", "linear", "all", OFFLOAD)
WORDS = ("none", "full", "auto")
_ITEM = re.compile(r"(?:(?P<choice>[a-z]+)(?::|$))?(?P<first>\d+)?(?:-(?P<last>\d+))?")


def read_choices(text: str, layers: int, key: str = "recompute") -> tuple[str, ...]:
    """What each of `layers` layers recomputes, one of CHOICES. auto, which the planner decides later: all.

    `text`: none | full | auto, or items with commas between them, each a layer (7) or a range of them (0-3), with or
    without what they recompute before it (mlp:0-3), which goes for the items after it too and is "all" at first; a
    choice alone (light) is for every layer. What no item names keeps everything. Raises ConfigError.
    """
    if text in WORDS:
        return ("none" if text == "none" else "all",) * layers
    found = ["none"] * layers
    choice = "all"
    for item in text.replace(" ", "").split(","):
        match = _ITEM.fullmatch(item)
        if match is None or not item:
            raise _unreadable(key, text, item)
        choice = match["choice"] or choice
        if choice not in CHOICES:
            raise _unreadable(key, text, choice)
        if match["first"] is None and (item != choice or match["last"]):
            raise _unreadable(key, text, item)
        first = 0 if match["first"] is None else int(match["first"])
        last = layers - 1 if match["first"] is None else int(match["last"] or first)
        if not first <= last < layers:
            raise ConfigError(
                f"{key}={text}: {item} is not among the {layers} layers; give layers from 0 to {layers - 1}, "
                "the first of a range before its last"
            )
        found[first : last + 1] = [choice] * (last + 1 - first)
    return tuple(found)


def resolve_recompute(name: str, part: PartConfig) -> str:
    """What the part (as "vision" or "text") recomputes, activation_checkpointing considered. Raises ConfigError."""
    text, checkpointing = part.recompute, part.activation_checkpointing
    if text is None:
        return "full" if checkpointing else "none"
    if checkpointing and text != "full":
        raise ConfigError(
            f"{name}.activation_checkpointing=true means {name}.recompute=full, and {name}.recompute={text} is given "
            f"too. Keep {name}.recompute alone."
        )
    numbers = [int(number) for number in re.findall(r"\d+", text)]
    read_choices(text, max(numbers, default=0) + 1, f"{name}.recompute")
    return text


def check_mlp_chunks(name: str, part: PartConfig, mlp: Sequence[str]) -> None:
    """Raises ConfigError where MLPs cannot compute some tokens at a time. mlp: names of modules in one, in a layer."""
    key, chunks = f"{name}.mlp_chunks", part.mlp_chunks
    if chunks == 1:
        return
    require_positive(key, chunks)
    others = {"compile=true": part.compile, f"expert={part.expert}": part.expert > 1}
    for other, refused in others.items():
        if refused:
            raise ConfigError(
                f"{key}={chunks} with {name}.{other}: chunks of an MLP are computed again in backward, each by itself. "
                f"Set {key}=1, or change {name}.{other.partition('=')[0]}."
            )
    if not all("." in one for one in mlp) or not mlp:
        raise ConfigError(f"{key}={chunks}: the MLPs of this model's {name} part are no modules of their own. Set 1.")


def _unreadable(key: str, text: str, item: str) -> ConfigError:
    known = [*WORDS, *CHOICES[1:]]
    return ConfigError(
        f"{key}={text} cannot be read: {item or 'an empty item'}. Give none, full, auto, layers as 0-3,7, or what "
        f"layers recompute as mlp:0-15,all:16-31 ({', '.join(CHOICES)}){did_you_mean([nearest(item, known)])}"
    )
