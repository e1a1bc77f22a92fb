"""Runs a family's text part, whole or in chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn

from dhp.config.model_rules import (
    check_autotp,
    check_expert_width,
    check_experts,
    check_heads,
    check_layers_of_rows,
    check_mixers,
    check_positions,
    check_tensor,
    shares_sequence,
)
from dhp.config.parts import resolved
from dhp.config.schema import PartConfig
from dhp.core.batch import LogitRule
from dhp.core.errors import ConfigError, ModelError
from dhp.core.heads import KEY, OUTPUT, QUERY, Projection, cuts_evenly, fills_evenly, head_range, share_heads
from dhp.core.transformers_private import set_attention
from dhp.models.flops import TextWork, text_work
from dhp.models.mixers import KINDS, Mixer, find_mixer
from dhp.models.tower import EMBEDDINGS
from dhp.models.types import (
    BlockRule,
    Chunk,
    DecoderInputs,
    Experts,
    HeadShape,
    LayerParts,
    Part,
    find_experts,
    held_layers,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PATH = "model.language_model"
_EXPERTS = "experts"  # the kind of a layer that has some


class Decoder(Part):
    """A decoder with gated MLPs or experts and grouped keys, as those of Qwen and Llama, and its head."""

    path: str = PATH
    modules: tuple[str, ...] = (PATH, "lm_head")
    embedding, norm, head = f"{PATH}.embed_tokens", f"{PATH}.norm", "lm_head"
    projections: tuple[str, ...] = tuple(f"{PATH}.layers.*.self_attn.{p}_proj" for p in "qkvo")
    entrance: tuple[str, ...] = ()  # modules beside the embedding through which a picture's rows enter
    enters: Mapping[str, int] = {}  # the layer after which a tensor of the tower is added to the states
    logits: LogitRule = LogitRule()
    mixers: tuple[str, ...] = ()  # classes of modules that carry state along a row, or kinds of layers
    by_sample: bool = False  # each sample of a row runs through the decoder alone, as its layers are not known here
    # How tokens of an image see each other both ways: `dhp.parallel.attention.visibility.BlockRule`; None: they do not.
    block_rule: BlockRule | None = None
    joins_images: bool = False  # tokens of all images of a sample see each other
    sees_prefix: bool = False  # not tokens of an image, but those up to the first one that is to be learned

    def __init__(self, config: Any):
        text = config.get_text_config()
        self.tied = bool(getattr(config, "tie_word_embeddings", False))  # the head's weight is the embedding's
        self.heads: int = text.num_attention_heads
        self.kv_heads: int = text.num_key_value_heads
        self.work: TextWork = self.count_work(text)
        self.experts = find_experts(text)
        self.layers = LayerParts(
            f"{PATH}.layers",
            tuple(f"self_attn.{p}_proj" for p in "qkvo"),
            ("mlp.gate_proj", "mlp.up_proj", *(("mlp.experts",) if self.experts else ())),
            tuple(
                _EXPERTS if self.experts and self.experts.sparse[n] else "causal" for n in range(text.num_hidden_layers)
            ),
        )
        sparse = self.experts.sparse if self.experts else ()
        self.shared = tuple(f"{PATH}.layers.{number}.mlp.experts" for number, some in enumerate(sparse) if some)
        self._vocabulary = (text.vocab_size, text.hidden_size)
        self._rope_types = _rope_types(getattr(text, "rope_parameters", None) or {})
        self._scaled = bool(getattr(text, "attn_temperature_tuning", False))
        self._text = text

    def count_work(self, text: Any) -> TextWork:
        """Arithmetic of the decoder of that configuration."""
        return text_work(text)

    def found_mixers(self) -> dict[str, Mixer | None]:
        """Layers that carry state along a row, by class; None: how ranks share them is not known here."""
        return {name: find_mixer(name, self._text) for name in sorted(self.mixers)}

    @property
    def mixing(self) -> tuple[float, Mixer]:
        """The share of the layers that carry state along a row, and the one that exchanges most values of a token."""
        kinds = getattr(self._text, "layer_types", None) or ["full_attention"]
        known = [one for one in self.found_mixers().values() if one is not None]
        mixer = max(known, key=lambda one: one.values, default=Mixer(1, 0, 0))
        return sum(kind in KINDS for kind in kinds) / len(kinds) if known else 0.0, mixer

    @property
    def takes(self) -> Mapping[str, int]:
        """Embeddings at the first layer, and those of `enters`."""
        return {EMBEDDINGS: 0, **self.enters}

    def check(self, asked: PartConfig) -> None:
        tensor = resolved(asked.tensor)
        check_tensor(self.heads, self.kv_heads, tensor)
        self._check_balance(asked)
        check_experts(self.experts.count if self.experts else 0, asked)
        if self.experts and tensor > 1:
            self._check_cut_experts(self.experts, asked)
        if asked.parallelism == "autotp":
            check_autotp(self.kv_heads, tensor)
        if shares_sequence(asked):
            check_heads(self.heads, self.kv_heads, asked)
            check_positions(self._rope_types, self._scaled)
            balance = self.experts.balance if self.experts else 0.0
            check_mixers([name for name, one in self.found_mixers().items() if one is None], asked)
            check_layers_of_rows(self.block_rule is not None, balance, asked)

    def check_answers(self) -> None:
        """Raises ModelError, by name, for a decoder that cannot answer prompts here: its cache of a row must be keys
        and values of each token."""
        reason = None
        if unknown := [name for name, one in self.found_mixers().items() if one is None]:
            reason = f"layers that carry state along the row ({', '.join(unknown)}), which no cache here keeps"
        elif self.sees_prefix:
            reason = "prompts all of whose tokens see each other, and their last one is taken behind the others here"
        elif self._scaled:
            reason = "queries that are scaled by their place in the row (attn_temperature_tuning)"
        if reason is not None:
            raise ModelError(
                f"a decoder with {reason}: it can be trained, but not answer prompts. Export the checkpoint "
                "(`python -m dhp export`) and generate with transformers"
            )

    def _check_balance(self, asked: PartConfig) -> None:
        """Raises ConfigError for settings that do not go with a load-balancing loss."""
        if not self.experts or not self.experts.balance:
            return
        refused = {
            "compile": (
                asked.compile,
                "false",
                "its routers are listened to, and compiled layers are not known to answer",
            ),
            "mlp_chunks": (
                asked.mlp_chunks > 1,
                "1",
                "its routers are recorded, and would be recorded again with each chunk",
            ),
            "pipeline": (
                resolved(asked.pipeline) > 1,
                "1",
                "it is a product of sums over all layers, which lie in several stages",
            ),
        }
        for key, (given, instead, why) in refused.items():
            if given:
                raise ConfigError(
                    f"text.{key}={str(getattr(asked, key)).lower()} of a decoder with a load-balancing loss "
                    f"(output_router_logits=true, router_aux_loss_coef={self.experts.balance} in its configuration): "
                    f"{why}. Set text.{key}={instead}, or output_router_logits to false in text_config of the model's "
                    "config.json to train without it."
                )

    def _check_cut_experts(self, experts: Experts, asked: PartConfig) -> None:
        check_expert_width(experts.width, resolved(asked.tensor))
        if asked.parallelism == "autotp":
            raise ConfigError(
                f"text.parallelism=autotp with text.tensor={asked.tensor} of a decoder with experts: slices of experts "
                "are not known to be exact there. Set text.parallelism=tensor, or text.tensor=1."
            )

    def uneven_axes(self, asked: PartConfig) -> tuple[str, ...]:
        tensor, ulysses = resolved(asked.tensor), resolved(asked.ulysses)
        ranges = [head_range(self.heads, self.kv_heads, tensor, rank) for rank in range(tensor)]
        even = {
            "tensor": cuts_evenly(self.heads, self.kv_heads, tensor),
            "ulysses": all(fills_evenly(own.end - own.first, sum(own.repeats), ulysses) for own in ranges),
        }
        return tuple(axis for axis, divides in even.items() if not divides)

    def shared_heads(self, tensor: int) -> Mapping[str, Projection]:
        """All of them where ranks do not divide the heads, those of keys and values where ranks share heads."""
        roles = zip(self.projections, (QUERY, KEY, KEY, OUTPUT), strict=True)
        found = {name: Projection(role, self.heads, self.kv_heads) for name, role in roles}
        if cuts_evenly(self.heads, self.kv_heads, tensor):
            return {name: one for name, one in found.items() if one.role == KEY and tensor > self.kv_heads}
        return found

    def head_shape(self, chunks: Sequence[Chunk]) -> HeadShape | None:
        """The embedding with the first chunk, the head with the last."""
        first, last = any(chunk.first for chunk in chunks), any(chunk.last for chunk in chunks)
        return HeadShape(*self._vocabulary, first + last, last) if first or last else None

    @property
    def tied_weight(self) -> str:
        return f"{self.embedding}.weight" if self.tied else ""

    def absent(self, chunks: Sequence[Chunk]) -> tuple[str, ...]:
        """Modules of the decoder that a group of ranks with these chunks alone does not hold.

        A head that is the embedding needs it: a group with the last chunk then holds the embedding under its own name,
        and so does the group with the first; the gradient of that weight is the sum of both groups'."""
        first, last = any(chunk.first for chunk in chunks), any(chunk.last for chunk in chunks)
        held = set(held_layers(chunks))
        absent = [f"{self.layers.path}.{layer}" for layer in self.whole.layers if layer not in held]
        if not (first or (last and self.tied)):
            absent.append(self.embedding)
        if not first:
            absent += self.entrance
        return (*absent, *(() if last else (self.norm, self.head)))

    def entering(self, chunk: Chunk) -> tuple[str, ...]:
        """Names of the tower's tensors that a chunk needs."""
        return tuple(name for name, layer in self.takes.items() if layer in chunk.layers)

    def split_heads(self, model: PreTrainedModel, ranks: int) -> None:
        """Raises ConfigError where ranks do not divide the heads, and attention is more than its four projections."""
        uneven = not cuts_evenly(self.heads, self.kv_heads, ranks)
        group = share_heads(self.heads, self.kv_heads, ranks, filled=False).size
        for layer in model.get_submodule(self.layers.path) if self.shared_heads(ranks) else ():
            attention = getattr(layer, "self_attn", None)
            problem = _unknown_attention(attention, self.heads, self.kv_heads) if uneven else None
            if problem is not None:
                raise ConfigError(
                    f"text.tensor={ranks} does not divide the text decoder's {self.heads} query and {self.kv_heads} "
                    f"key/value heads, and its {type(layer).__name__} {problem}: that uneven shares of it are exact is "
                    "not known. Set text.tensor to a number that divides the heads, and text.num_actors to match"
                )
            if attention is not None:  # a layer with a mixer has none
                attention.num_key_value_groups = group

    def head_of(self, model: nn.Module) -> nn.Linear:
        """The matrix from states to the vocabulary, of a model that holds it."""
        return cast("nn.Linear", model.get_submodule(self.head))

    def use_attention(self, model: PreTrainedModel, name: str) -> None:
        """Make the decoder call the registered attention function `name`, and build no mask."""
        set_attention(model.get_submodule(self.path).config, name)

    def run(self, model: PreTrainedModel, chunk: Chunk, inputs: DecoderInputs, **extra: Any) -> Tensor:
        """The states that a chunk, which `model` holds, makes of its inputs, [rows, tokens, hidden].

        `extra` reaches the attention function as it is. The library's own forward runs, and so its rotary embeddings,
        on the chunk's layers alone."""
        decoder = model.get_submodule(self.path)
        states = embed(model, inputs) if chunk.first else inputs.hidden
        layers = [self._layer(decoder, chunk, index, inputs) for index in self.whole.layers]
        with having(decoder, layers=layers, **({} if chunk.last else {"norm": unchanged})):
            named = {"position_ids": inputs.position_ids, "use_cache": False, **extra}
            output = decoder(inputs_embeds=states, **named)
        return output.last_hidden_state

    def _layer(self, decoder: nn.Module, chunk: Chunk, index: int, inputs: DecoderInputs) -> Callable[..., Tensor]:
        if index not in chunk.layers:
            return unchanged
        layer = decoder.layers.get_submodule(str(index))
        added = [inputs.images[name] for name, place in self.enters.items() if place == index and name in inputs.images]
        return partial(_run_and_add, layer, added, inputs) if added else layer


def _unknown_attention(attention: nn.Module | None, heads: int, kv_heads: int) -> str | None:
    """What a layer's attention has besides, or lacks of, four projections of so many heads and norms of one head."""
    if attention is None:
        return "has no self_attn"
    parts, dim = dict(attention.named_children()), getattr(attention, "head_dim", None)
    expected = {"q_proj": None, "k_proj": kv_heads, "v_proj": kv_heads, "o_proj": heads}
    for name, count in expected.items():
        if name not in parts:
            return f"has no self_attn.{name}"
        width = getattr(parts[name], "in_features" if name == "o_proj" else "out_features")
        if count is not None and width != count * dim:
            return f"has a self_attn.{name} that is {width} wide, not heads({count}) × head_dim({dim})"
    more = [name for name, _ in attention.named_parameters(recurse=False)]
    of_one_head = {name: all(one.shape == (dim,) for one in part.parameters()) for name, part in parts.items()}
    more += [name for name, alone in of_one_head.items() if name not in expected and not alone]
    return f"has self_attn.{more[0]}" if more else None


def embed(model: PreTrainedModel, inputs: DecoderInputs) -> Tensor:
    """The first layer's states, [rows, tokens, hidden].

    Features of encoders are scattered by their positions: the model's own code searches the tokens for
    placeholders on the device, and waits for the result."""
    states = model.get_input_embeddings()(inputs.input_ids)
    flat = states.flatten(0, 1)
    if EMBEDDINGS in inputs.images:
        flat = flat.index_copy(0, inputs.image_positions, inputs.images[EMBEDDINGS].to(flat.dtype))
    for part, tensors in inputs.others.items():
        for rows in tensors.values():
            flat = flat.index_copy(0, inputs.other_positions[part], rows.to(flat.dtype))
    return flat.view_as(states)


def _rope_types(parameters: Mapping[str, Any]) -> set[str]:
    inner = (value for value in parameters.values() if isinstance(value, Mapping))
    own = {parameters["rope_type"]} if "rope_type" in parameters else set()
    return own.union(*map(_rope_types, inner))


def _run_and_add(
    layer: Callable[..., Tensor], added: Sequence[Tensor], inputs: DecoderInputs, states: Tensor, **named: Any
) -> Tensor:
    """A layer, and then its states with `added` [n, hidden] at the images' places. Outside of the layer's own call,
    which may run again in backward."""
    output = layer(states, **named)
    for images in added:
        output = inputs.add(output, images.to(output.dtype), inputs.image_positions)
    return output


def unchanged(states: Tensor, *_: Any, **__: Any) -> Tensor:
    return states


@contextmanager
def having(module: nn.Module, **others: Any) -> Iterator[None]:
    """In the block the forward of `module` finds `others` instead of its children of these names.

    The children themselves are not moved: their names, parameters and hooks are those of the model."""
    module.__dict__.update(others)  # found before `_modules`
    try:
        yield
    finally:
        for name in others:
            del module.__dict__[name]
