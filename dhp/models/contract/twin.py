"""Makes a model's small twin, whole and in parts."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from dhp.core.batch import LogitRule
from dhp.core.errors import ModelError
from dhp.core.transformers_private import set_experts
from dhp.models.contract.contract import (
    LAST,
    POOLED,
    Encoded,
    Handover,
    Structure,
    family_class,
    find_structure,
    states_of,
    with_called,
    without_weights,
)
from dhp.models.contract.random_pictures import Make, Picture, ways
from dhp.models.contract.random_rows import kinds_for, make_row
from dhp.models.load import cast_reals

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


MOST = 1_000_000_000  # parameters of a twin: eight bytes each
NOT_HANDED_OVER = ("hidden_states", "attentions")


@dataclass(frozen=True)
class TwinSample:
    """One conversation: ids, kinds [1, tokens], and its pictures' numbers."""

    ids: Tensor
    kinds: Tensor
    pictures: tuple[int, ...]


class ProbeModel:
    """The model in float64, in training mode, with weights that leave no output small."""

    def __init__(self, config: PreTrainedConfig):
        """Raises ModelError for a configuration of which no model can be made or that encodes no picture."""
        self.config = config
        self._tokens: dict[int, int] = {}
        self.model = _make(config)
        self.structure: Structure = find_structure(self.model)
        self.base = self.model.get_submodule(self.structure.base)
        before = torch.random.get_rng_state()
        self.make, output = self._way()
        self.handover = self._handover(output)
        self._tokens[0] = len(self.handover.take(output)[self.handover.names[0]])
        self._refuse_chance(before)
        self.logits = self._find_logits()

    def picture(self, number: int) -> Picture:
        return self.make(number)

    def encode(self, pictures: Picture) -> Any:
        return self.base.get_image_features(**pictures, return_dict=True)

    def tokens(self, number: int) -> int:
        """Placeholders of a picture."""
        if number not in self._tokens:
            with torch.no_grad():
                rows = self.handover.take(self.encode(self.picture(number)))
            self._tokens[number] = len(rows[self.handover.names[0]])
        return self._tokens[number]

    def sample(self, pictures: Sequence[int], seed: int) -> TwinSample:
        ids, kinds = make_row(self.config, [self.tokens(number) for number in pictures], seed)
        return TwinSample(ids, kinds, tuple(pictures))

    def _refuse_chance(self, before: Tensor) -> None:
        """Raises ModelError for layers that draw random numbers in training: what they drew on one rank cannot be drawn
        again on another, nor when a layer is recomputed. before: the state of torch's generator before any was run."""
        ids, kinds = make_row(self.config, [], seed=1)
        with torch.no_grad():
            self.model(input_ids=ids, use_cache=False, **kinds_for(self.model.forward, kinds))
        if not torch.equal(before, torch.random.get_rng_state()):
            raise ModelError(
                f"model_type {self.config.model_type!r}: some of its layers draw random numbers in training (drop "
                "path, dropout), and what one rank drew no other can draw again. Set these rates to 0 in the model's "
                "config.json"
            )

    def _find_logits(self) -> LogitRule:
        """The rule from the head's output to logits. Raises ModelError where no rule that is known here gives them."""
        path, text = self.structure.head, self.config.get_text_config()
        head = None if path is None else self.model.get_submodule(path)
        if head is None or getattr(head, "bias", None) is not None:
            raise ModelError(
                f"model_type {self.config.model_type!r}: its head is not one matrix without a bias, which is what the "
                "loss over a divided vocabulary takes"
            )
        ids, kinds = make_row(self.config, [], seed=2)
        given = {"input_ids": ids, "use_cache": False, **kinds_for(self.base.forward, kinds)}
        with torch.no_grad():
            states = states_of(self.model, self.structure, **given)
            wanted, output = self.model(**given).logits, head(states)
        for rule in _rules(text):
            if torch.allclose(_ruled(output, rule), wanted, rtol=1e-6, atol=1e-6):
                return rule
        raise ModelError(
            f"model_type {self.config.model_type!r}: its logits are neither its head's output nor that output "
            "scaled or soft-capped as its configuration says, so that the loss is not known here"
        )

    def _way(self) -> tuple[Make, Any]:
        refused = []
        for make in ways(self.config, self.base.get_image_features):
            try:
                with torch.no_grad():
                    return make, self.encode(make(0))
            except Exception as error:  # a form that is not the family's may fail anyhow
                refused.append(f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}")
        raise ModelError(
            f"model_type {self.config.model_type!r}: no picture could be made for its get_image_features "
            f"({'; '.join(refused) or 'its arguments are not known here'})"
        )

    def _handover(self, output: Mapping[str, Any]) -> Handover:
        """The fields of an encoder's output that the decoder reads, found by running it on one."""
        main = POOLED if output.get(POOLED) is not None else LAST
        if output.get(main) is None:
            raise ModelError(
                f"model_type {self.config.model_type!r}: what its encoder hands over ({', '.join(output)}) has no "
                f"{POOLED} or {LAST} whose rows stand for a picture's placeholders, and by which layers the others "
                "enter is not known here"
            )
        listed = isinstance(output[main], list | tuple)
        plain = Handover(main, (), listed)
        rows = plain.take(output)
        ids, kinds = make_row(self.config, [len(rows[plain.names[0]])], seed=0)
        levels = {name: value for name, value in output.items() if name not in (main, *NOT_HANDED_OVER)}
        grids = {name: value for name, value in self.picture(0).items() if name.startswith("image_grid")}
        named = {"input_ids": ids, "use_cache": False, **kinds_for(self.base.forward, kinds), **grids}
        for stacked in (False, True):
            plain = Handover(main, (), listed, stacked=stacked)
            shown = Encoded({main: getattr(plain.give(rows), main), **levels})
            try:
                with torch.no_grad(), self._calls() as called:
                    states_of(self.model, self.structure, mm_encoder_outputs={"image": shown}, **named)
                break
            except Exception:  # a decoder that wants another form may fail anyhow
                if stacked or listed:
                    raise
        self.called = tuple(name for name in self.structure.vision if name in called)
        self.structure = with_called(self.structure, self.called)
        more, shared = [], []
        for name in dict.fromkeys(shown.read):
            if name == main or not isinstance(levels.get(name), Tensor | list | tuple):
                continue
            if isinstance(levels[name], Tensor) and levels[name].ndim == 2:
                count = len(levels[name])
                shared.append((name, count, -(-count // len(rows[plain.names[0]]))))
                continue
            more.append((name, len(levels[name])))
        return Handover(main, tuple(more), listed, tuple(shared), plain.stacked)

    @contextmanager
    def _calls(self) -> Iterator[set[str]]:
        """Names of modules that are called in the block."""
        called: set[str] = set()
        hooks = [
            module.register_forward_pre_hook(lambda *_, name=name: called.add(name))
            for name, module in self.model.named_modules()
        ]
        try:
            yield called
        finally:
            for hook in hooks:
                hook.remove()


def _make(config: PreTrainedConfig) -> PreTrainedModel:
    kind = family_class(config)
    size = sum(parameter.numel() for parameter in without_weights(config).parameters())
    if size > MOST:
        raise ModelError(
            f"model_type {config.model_type!r}: its configuration, made small, still has {size:,} parameters, "
            f"more than the {MOST:,} that are tried"
        )
    state = torch.random.get_rng_state()
    try:
        torch.manual_seed(0)
        model = kind._from_config(config)
        model = exact_experts(model).train()
        cast_reals(model, torch.float64)
        _spread(model)
    except (ValueError, ImportError) as error:
        raise ModelError(f"{kind.__name__} cannot be made: {str(error).strip()}") from error
    finally:
        torch.random.set_rng_state(state)
    return model


def exact_experts(model: PreTrainedModel) -> PreTrainedModel:
    """The model, whose experts are run one by one: grouped products have no kernel for float64."""
    for module in model.modules():
        if hasattr(module, "config"):  # a layer may have one to itself
            set_experts(module.config, "eager")
    return model


def _rules(text: Any) -> Iterator[LogitRule]:
    caps = [getattr(text, "final_logit_softcapping", None), None]
    divisors = (getattr(text, name, None) for name in ("logits_scaling", "logits_mup_width_multiplier"))
    factors = (getattr(text, name, None) for name in ("logit_scale", "output_multiplier"))
    factors = [1.0, *(1 / one for one in divisors if one), *(one for one in factors if one)]
    return (LogitRule(factor, cap) for cap in caps for factor in factors)


def _ruled(output: Tensor, rule: LogitRule) -> Tensor:
    scaled = output * rule.factor
    return scaled if rule.softcap is None else (scaled / rule.softcap).tanh() * rule.softcap


def _spread(model: nn.Module) -> None:
    """Weights large enough that each shows in the loss."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0, 1.5 * parameter.shape[-1] ** -0.5)
            elif not parameter.any():
                parameter.normal_(0, 0.05)
