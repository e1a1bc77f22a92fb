"""Reads and writes config.json of transformers 4 and 5."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers import __version__ as installed

from dhp.core.batch import PositionRange
from dhp.core.errors import ModelError
from dhp.core.files import write_whole
from dhp.models.contract.random_rows import differs_behind_videos
from dhp.models.family import Family

Content = dict[str, Any]
FILE, TOKENIZER_FILE = "config.json", "tokenizer_config.json"
_FULL, _LOCAL = "full_attention", "sliding_attention"
_KINDS = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")  # of rotary positions that version 4 knows


def save_model(model: PreTrainedModel, folder: Path) -> None:
    """The library's `save_pretrained` of a model that is made here, with a config.json that both versions read."""
    model.save_pretrained(folder)
    write_config(folder, read_config(folder))


def read_config(folder: Path) -> Content:
    """config.json as it stands."""
    return dict(json.loads((folder / FILE).read_text(encoding="utf-8")))


def write_config(folder: Path, content: Content) -> None:
    """Write config.json to a folder. What version 5 alone would read gets version 4's keys beside it, unless the
    installed version would then read another model."""
    wanted = _write(folder, content)
    both = json.loads(json.dumps(content))
    for section in _sections(both):
        if isinstance(section.get("rope_parameters"), dict):
            section.update(flat_rope(section["rope_parameters"]))
        if isinstance(section.get("dtype"), str):
            section["torch_dtype"] = section["dtype"]
    if both != content and not _holds(_write(folder, both), wanted):
        _write(folder, content)


def _write(folder: Path, content: Content) -> Content:
    """Write the file; what the library reads of it."""
    write_whole(folder / FILE, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    return AutoConfig.from_pretrained(folder, trust_remote_code=False).to_dict()


def _holds(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, Mapping) and isinstance(found, Mapping):
        return all(key in found and _holds(found[key], value) for key, value in wanted.items())
    return bool(found == wanted)


def flat_rope(rope: Mapping[str, Any]) -> Content:
    """Rotary positions in version 4's keys. rope: version 5's `rope_parameters`; by kinds of layers those of layers
    that see all, with the base of those that see a window beside them (Gemma 3)."""
    if any(isinstance(own, Mapping) for own in rope.values()):
        if not all(isinstance(rope.get(kind), Mapping) for kind in (_FULL, _LOCAL)):
            return {}
        return {**flat_rope(rope[_FULL]), "rope_local_base_freq": rope[_LOCAL].get("rope_theta")}
    flat = {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
    scaling = {key: value for key, value in rope.items() if key not in flat}
    kind = scaling.setdefault("rope_type", "default")
    return flat | ({"rope_scaling": scaling} if kind in _KINDS and scaling != {"rope_type": "default"} else {})


def set_dtype(content: Content, dtype: str) -> None:
    """Name the number format of the weights where the file names one, and at the top."""
    content.setdefault("torch_dtype", dtype)
    for section in _sections(content):
        for key in ("torch_dtype", "dtype"):
            if isinstance(section.get(key), str):
                section[key] = dtype


def set_text(content: Content, config: Any, values: Mapping[str, Any]) -> None:
    """Set fields of the decoder, in its section, or at the top where the file has all there. config: as read of it."""
    _text_section(content, config).update(values)


def _text_section(content: Content, config: Any) -> Content:
    text = config.get_text_config()
    for name in getattr(config, "sub_configs", {}):
        own, section = getattr(config, name, None), content.get(name)
        if isinstance(section, dict) and own is not None and own.get_text_config() is text:
            return _text_section(section, own)
    return content


def _sections(content: Content) -> Iterator[Content]:
    yield content
    for name, value in content.items():
        if name.endswith("_config") and isinstance(value, dict):
            yield from _sections(value)


def write_tokenizer_config(folder: Path) -> None:
    """Rewrite the tokenizer_config.json that version 5 has just saved: further special tokens, and those that have a
    name in the family's processor, under keys that both read."""
    file = folder / TOKENIZER_FILE
    content = json.loads(file.read_text(encoding="utf-8"))
    if isinstance(content.get("extra_special_tokens"), list):
        content["additional_special_tokens"] = content.pop("extra_special_tokens")
    named = {key: token for key, token in content.items() if key.endswith("_token") and isinstance(token, str)}
    own = {key: token for key, token in named.items() if key not in PreTrainedTokenizerBase.SPECIAL_TOKENS_ATTRIBUTES}
    write_whole(file, json.dumps(content | ({"extra_special_tokens": own} if own else {}), indent=2) + "\n")


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
_WINDOWED = "sliding_attention"  # layers that see a window alone: their positions stay


def change_positions(folder: Path, rope_theta: float | None = None, max_positions: int | None = None) -> None:
    """Rewrite `folder`/config.json: the base of the decoder's rotary positions, and the longest row that it knows.

    Raises ModelError for a decoder without rotary positions, or one whose configuration does not keep what was set."""
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
            kind: dict(own) if kind == _WINDOWED else _changed(folder, own, rope_theta, trained_with)
            for kind, own in parameters.items()
        }
    changed = dict(parameters)
    if rope_theta is not None:
        changed["rope_theta"] = rope_theta
    if trained_with is not None and changed.get("rope_type") in _NEEDS_ORIGINAL:
        changed.setdefault(_ORIGINAL, trained_with)
    return changed
