"""A small model with random weights and its pictures, run whole and in two parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from dhp.core.errors import ModelError
from dhp.core.generation import LogitRule
from dhp.models.contract.contract import LAST, POOLED, Encoded, Handover
from dhp.models.contract.pictures import Make, Picture, ways
from dhp.models.contract.rows import kinds_for, make_row
from dhp.models.contract.structure import Structure, family_class, find_structure, without_weights

MOST = 1_000_000_000  # parameters of a twin: eight bytes each
NOT_HANDED_OVER = ("hidden_states", "attentions")


@dataclass(frozen=True)
class Sample:
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

    def sample(self, pictures: Sequence[int], seed: int) -> Sample:
        ids, kinds = make_row(self.config, [self.tokens(number) for number in pictures], seed)
        return Sample(ids, kinds, tuple(pictures))

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
        head, text = self.model.get_output_embeddings(), self.config.get_text_config()
        if head is None or getattr(head, "bias", None) is not None:
            raise ModelError(
                f"model_type {self.config.model_type!r}: its head is not one matrix without a bias, which is what the "
                "loss over a divided vocabulary takes"
            )
        ids, kinds = make_row(self.config, [], seed=2)
        given = {"input_ids": ids, "use_cache": False, **kinds_for(self.base.forward, kinds)}
        with torch.no_grad():
            states = self.base(**given).last_hidden_state
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
        listed = isinstance(output[main], list | tuple)
        plain = Handover(main, (), listed)
        rows = plain.take(output)
        ids, kinds = make_row(self.config, [len(rows[plain.names[0]])], seed=0)
        levels = {name: value for name, value in output.items() if name not in (main, *NOT_HANDED_OVER)}
        shown = Encoded({main: (rows[plain.names[0]],) if listed else rows[plain.names[0]], **levels})
        with torch.no_grad():
            self.base(
                input_ids=ids,
                mm_encoder_outputs={"image": shown},
                use_cache=False,
                **kinds_for(self.base.forward, kinds),
                **{name: value for name, value in self.picture(0).items() if name.startswith("image_grid")},
            )
        more, shared = [], []
        for name in dict.fromkeys(shown.read):
            if name == main or not isinstance(levels.get(name), Tensor | list | tuple):
                continue
            if isinstance(levels[name], Tensor) and levels[name].ndim == 2:
                count = len(levels[name])
                shared.append((name, count, -(-count // len(rows[plain.names[0]]))))
                continue
            more.append((name, len(levels[name])))
        return Handover(main, tuple(more), listed, tuple(shared))


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
        model = exact_experts(model).to(torch.float64).train()
        _spread(model)
    except (ValueError, ImportError) as error:
        raise ModelError(f"{kind.__name__} cannot be made: {str(error).strip()}") from error
    finally:
        torch.random.set_rng_state(state)
    return model


def exact_experts(model: PreTrainedModel) -> PreTrainedModel:
    """The model, whose experts are run one by one: grouped products have no kernel for float64."""
    if hasattr(model, "set_experts_implementation"):
        try:
            model.set_experts_implementation("eager")
        except (ValueError, KeyError, AttributeError):
            pass  # it has no experts
    return model


def _rules(text: Any) -> Iterator[LogitRule]:
    caps = [getattr(text, "final_logit_softcapping", None), None]
    scaling, scale = getattr(text, "logits_scaling", None), getattr(text, "logit_scale", None)
    factors = [1.0, *([1 / scaling] if scaling else []), *([scale] if scale else [])]
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
