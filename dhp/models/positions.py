"""The range of positions that a model supports, and changes of its rotary positions.

In a loaded model it would be too late: frequencies are computed when it is built, and a checkpoint has the directory's
configuration.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers import AutoConfig
from transformers import __version__ as installed

from dhp.core.batch import PositionRange
from dhp.core.errors import ModelError
from dhp.models.config_file import flat_rope, read_config, set_text, write_config
from dhp.models.contract.rows import differs_behind_videos
from dhp.models.family import Family

_STRETCHED = ("linear", "yarn", "llama3", "longrope")  # kinds of rotary positions with a factor that stretches them
_UNBOUNDED = "dynamic"  # turns by the row's length


def find_positions(config: Any) -> PositionRange | None:
    """The decoder's range; None where its configuration sets no bound."""
    text = config.get_text_config()
    known = getattr(text, "max_position_embeddings", None)
    rotary = list(_kinds(getattr(text, "rope_parameters", None) or {}))
    if not known or any(one.get("rope_type") == _UNBOUNDED for one in rotary):
        return None
    stretched = [
        int((one.get("original_max_position_embeddings") or known) * (one.get("factor") or 1.0))
        for one in rotary
        if one.get("rope_type") in _STRETCHED
    ]
    return PositionRange(max(known, *stretched, 0), not any("mrope_section" in one for one in rotary))


def tell_positions(rule: str, family: Family) -> str | None:
    """A line for data with videos; None where the model's makers and the installed library agree on what is behind
    them. rule: data.positions."""
    own = family.processor
    one_run = own.video_token_id is not None and own.step_tokens is None  # or each step is a picture of its own
    if not one_run or not differs_behind_videos(own.model(), family.config):
        return None
    library = f"the installed transformers {installed} begins"
    if rule == "published":
        return f"text behind a video goes on at its last position plus one, as the makers have it; {library} earlier"
    return f"warning: data.positions=library: {library} text behind a video earlier than makers and servers do"


def _kinds(parameters: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    inner = [value for value in parameters.values() if isinstance(value, Mapping)]
    if not inner:
        yield parameters
    for one in inner:
        yield from _kinds(one)


_NEEDS_ORIGINAL = ("yarn", "longrope", "llama3", "dynamic")  # kinds that go by what the model was trained with
_ORIGINAL = "original_max_position_embeddings"
_LOCAL = "sliding_attention"  # layers that see a window alone: their positions stay


def change_positions(folder: Path, rope_theta: float | None = None, max_positions: int | None = None) -> None:
    """Rewrite `folder`/config.json: the base of the decoder's rotary positions, and the longest row that it knows.

    Raises ModelError for a decoder without rotary positions, or one whose configuration does not keep what was set.
    """
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    text = config.get_text_config()
    before = getattr(text, "max_position_embeddings", None)
    changes: dict[str, Any] = {}
    if rope_theta is not None or max_positions is not None:
        text.rope_parameters = _changed(folder, text.rope_parameters, rope_theta, before if max_positions else None)
        changes |= {**flat_rope(text.rope_parameters), "rope_parameters": text.rope_parameters}
    if max_positions is not None:
        text.max_position_embeddings = changes["max_position_embeddings"] = max_positions
    content = read_config(folder)
    set_text(content, config, changes)
    write_config(folder, content)
    again = AutoConfig.from_pretrained(folder, trust_remote_code=False).get_text_config()
    kept = (again.rope_parameters, again.max_position_embeddings)
    if kept != (text.rope_parameters, text.max_position_embeddings):
        raise ModelError(
            f"{folder}: its configuration came back with {kept[0]} and {kept[1]} positions after "
            f"rope_theta={rope_theta} and max_positions={max_positions} were set. Write them to config.json yourself"
        )


def _changed(
    folder: Path, parameters: Mapping[str, Any] | None, rope_theta: float | None, trained_with: int | None
) -> dict[str, Any]:
    """trained_with: positions before there are to be more; None: there are not."""
    if not parameters:
        raise ModelError(f"{folder}: its decoder has no rotary positions (rope_parameters), so no rope_theta to raise")
    if all(isinstance(own, Mapping) for own in parameters.values()):  # by kind of layer
        return {
            kind: dict(own) if kind == _LOCAL else _changed(folder, own, rope_theta, trained_with)
            for kind, own in parameters.items()
        }
    changed = dict(parameters)
    if rope_theta is not None:
        changed["rope_theta"] = rope_theta
    if trained_with is not None and changed.get("rope_type") in _NEEDS_ORIGINAL:
        changed.setdefault(_ORIGINAL, trained_with)
    return changed
