"""config.json in the forms that versions 4 and 5 of transformers read.

Version 5 saves rotary positions as `rope_parameters` and the number format as `dtype`. Version 4 reads `rope_theta`,
`rope_scaling` and `torch_dtype`, and takes its defaults without a word where they are missing. Both read what version 4
wrote, which is the form of most published models.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase

from dhp.core.files import write_whole

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
