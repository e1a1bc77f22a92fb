"""Makes a model's configuration small."""

import copy
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig

MOST_HEADS, MOST_LAYERS, MOST_EXPERTS, VOCABULARY = 4, 4, 8, 1024
TOWER_HEAD = 16  # width of a tower's head
INNER = 64  # width inside MLPs

_HEADS = ("num_attention_heads", "num_heads", "attention_heads", "n_heads")
_KEY_HEADS = ("num_key_value_heads", "n_kv_heads")
_WIDTHS = ("embed_dim", "hidden_size", "d_model", "n_embd")  # a tower with both gives the second to the decoder
_LAYERS = ("num_hidden_layers", "depth", "num_layers", "n_layers")
_INNER = (
    "intermediate_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "intermediate_size_mlp",
    "ffn_dim",
    "mlp_hidden_size",
    "moe_shared_expert_intermediate_size",
    "dense_intermediate_size",
)
# The most of each number that does not depend on others.
_MOST = {
    **dict.fromkeys(_INNER, INNER),
    **dict.fromkeys(
        ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts"), MOST_EXPERTS
    ),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "top_k_experts", "moe_topk"), 2),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 32},
}
_MOST_OF_AUDIO = {"encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": INNER, "d_model": 32}
# Of a projector: as wide as the tower, or as the patches that become one token.
_OF_TOWERS = ("projection_hidden_size", "mm_hidden_size", "vision_hidden_size", "out_hidden_size")


def shrink(config: PreTrainedConfig, towers: bool = False) -> PreTrainedConfig:
    """A configuration of the same family, as small as its structure allows.

    The decoder keeps a layer of each kind, the tower all its layers unless `towers` asks for few there too. Special
    tokens move into a small vocabulary.
    Raises what the family's configuration class raises for sizes that do not go together."""
    given = copy.deepcopy(config.to_dict())
    text_key = _text_key(config)
    text = given if text_key is None else given[text_key]
    old = _first(text, _WIDTHS)  # other sections that name it must follow
    for section in _sections(given):
        if section is text:
            continue
        before = _first(section, _WIDTHS)
        _narrow(section, cut_layers=False)
        for name in _OF_TOWERS if before else ():
            joined = given[name] // before if isinstance(given.get(name), int) and given[name] % before == 0 else None
            if joined in (1, 4):
                given[name] = joined * _first(section, _WIDTHS)
        if towers:
            _shorten_tower(section, given)
        if section is not given:
            _follow(section, old, old)
    _narrow(text, cut_layers=True)
    new = _first(text, _WIDTHS)
    for section in _sections(given):
        _follow(section, old, new, towers=section is not given)
    if text is not given and given.get("hidden_size") == old:
        given["hidden_size"] = new
    _fit_rotation(text)
    _renumber(given, text)
    for name in ("model_type", "architectures", "transformers_version", "_name_or_path", "dtype", "torch_dtype"):
        given.pop(name, None)
    return type(config)(**given)


def _text_key(config: PreTrainedConfig) -> str | None:
    own = config.get_text_config()
    return next((name for name in config.sub_configs if getattr(config, name, None) is own), None)


def _sections(given: dict[str, Any]) -> list[dict[str, Any]]:
    found = [given]
    for key, value in given.items():
        if isinstance(value, dict) and ("model_type" in value or key.endswith("_config")):
            found += _sections(value)
    return found


def _first(section: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    return next((section[name] for name in names if isinstance(section.get(name), int)), None)


def _narrow(section: dict[str, Any], cut_layers: bool) -> None:
    heads, width = _first(section, _HEADS), _first(section, _WIDTHS)
    if cut_layers:
        _shorten(section)
    if heads and width and heads > MOST_HEADS:
        head = section.get("head_dim") or width // heads
        _narrow_heads(section, heads, head if cut_layers else min(head, TOWER_HEAD), width)
    is_audio = isinstance(section.get("encoder_attention_heads"), int)
    for name, most in {**_MOST, **(_MOST_OF_AUDIO if is_audio else {})}.items():
        value = section.get(name)
        if isinstance(value, int):
            section[name] = min(value, most)
        elif isinstance(value, list) and name in _INNER:
            section[name] = [min(one, most) for one in value]
    if section.get("pixel_shuffle_ratio"):  # patches of a square become one behind the layers
        section["intermediate_size"] = int(_first(section, _WIDTHS) / section["pixel_shuffle_ratio"] ** 2)


def _narrow_heads(section: dict[str, Any], heads: int, head: int, width: int) -> None:
    few = MOST_HEADS
    for name in _HEADS:
        if section.get(name) == heads:
            section[name] = few
    for name in _KEY_HEADS:
        value = section.get(name)
        if isinstance(value, int):
            section[name] = few if value == heads else min(value, few // 2)
    narrow = few * head
    if isinstance(section.get("head_dim"), int):
        section["head_dim"] = head
    own = next(name for name in _WIDTHS if isinstance(section.get(name), int))
    section[own] = narrow


def _shorten(section: dict[str, Any]) -> None:
    name = next((name for name in _LAYERS if isinstance(section.get(name), int)), None)
    if name is None or section[name] <= MOST_LAYERS:
        return
    layers = section[name]
    kinds = [value for value in section.values() if isinstance(value, list) and len(value) == layers]
    few = max([MOST_LAYERS, *(_covering(kind) for kind in kinds)])
    section[name] = few
    for key, value in section.items():
        if isinstance(value, list) and len(value) == layers:
            section[key] = value[:few]
        elif key == "per_layer_config" and isinstance(value, dict):
            section[key] = {number: own for number, own in value.items() if int(number) < few}
    for key in ("first_k_dense_replace", "num_kv_shared_layers", "moe_layer_start_index"):
        if isinstance(section.get(key), int):
            section[key] = min(section[key], 1 if key != "num_kv_shared_layers" else few // 2)


def _shorten_tower(section: dict[str, Any], given: dict[str, Any]) -> None:
    """As `_shorten`; layers that are named by their numbers move to the same places among fewer."""
    before = _first(section, _LAYERS)
    _shorten(section)
    after = _first(section, _LAYERS)
    if before is None or after is None or after == before:
        return
    moved = lambda layer: layer if layer < 0 else layer * after // before
    for owner in (section, given):
        for key, value in owner.items():
            if not ("index" in key and "token" not in key) and key != "vision_feature_layer":
                continue
            if isinstance(value, list) and all(isinstance(one, int) for one in value):
                owner[key] = sorted({max(moved(one), -after) for one in value})
            elif key == "vision_feature_layer" and isinstance(value, int):
                owner[key] = max(moved(value), -after)


def _covering(kinds: list[Any]) -> int:
    """How many from the first on hold one of each kind."""
    seen = {repr(kind) for kind in kinds}
    return next(n for n in range(1, len(kinds) + 1) if {repr(kind) for kind in kinds[:n]} == seen)


def _follow(section: dict[str, Any], old: int | None, new: int | None, towers: bool = True) -> None:
    """Bring widths that are the decoder's from the old one to the new one. towers: what leaves one has that width."""
    for name in ("out_hidden_size", "projection_dim", "text_hidden_size", "output_dim", "projector_hidden_size"):
        if section.get(name) == old or (towers and name == "out_hidden_size" and isinstance(section.get(name), int)):
            section[name] = new
    if isinstance(section.get("embed_dim"), int) and isinstance(section.get("hidden_size"), int):
        section["hidden_size"] = new


def _fit_rotation(text: dict[str, Any]) -> None:
    """Positions on several axes share a head; the fraction of it that they rotate is a key of its own."""
    rope = text.get("rope_parameters")
    sections = rope.get("mrope_section") if isinstance(rope, dict) else None
    head = text.get("head_dim") or (_first(text, _WIDTHS) or 0) // (_first(text, _HEADS) or 1)
    if sections and head and "partial_rotary_factor" not in rope and 2 * sum(sections) < head:
        rope["partial_rotary_factor"] = 2 * sum(sections) / head


def _renumber(given: dict[str, Any], text: dict[str, Any]) -> None:
    """Move special tokens into the small vocabulary, each under a number of its own."""
    old = text.get("vocab_size")
    if not isinstance(old, int) or old <= VOCABULARY:
        return
    moved: dict[int, int] = {}

    def move(value: Any) -> Any:
        if isinstance(value, list):
            return [move(one) for one in value]
        if not isinstance(value, int) or isinstance(value, bool) or value < VOCABULARY // 2:
            return value
        return moved.setdefault(value, VOCABULARY - 1 - len(moved))

    for section in _sections(given):
        for key, value in section.items():
            if key.endswith(("_token_id", "_token_index", "_token_ids", "_id", "_ids")) and value is not None:
                section[key] = move(value)
            elif key.startswith("vocab_size") and value == old:
                section[key] = VOCABULARY
