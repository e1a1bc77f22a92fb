"""Makes a model's small twin, whole and in parts."""

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
from dhp.models.contract.clips import clip_arguments, mask_name
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
from dhp.models.contract.double import staying_double
from dhp.models.contract.random_pictures import Make, Picture, plain_frame, row_values, unpack, ways
from dhp.models.contract.random_rows import kinds_for, make_row, moving_placeholder
from dhp.models.contract.videos import MOVING, pack_frames, video_arguments
from dhp.models.load import cast_reals

DUMMY_FRAMES = 64  # of the clip of a rank without work
MOST = 1_000_000_000  # parameters of a twin: eight bytes each
NOT_HANDED_OVER = ("hidden_states", "attentions")


@dataclass(frozen=True)
class TwinSample:
    """One conversation: ids, kinds [1, tokens], and its pictures' numbers."""

    ids: Tensor
    kinds: Tensor
    pictures: tuple[int, ...]
    videos: tuple[int, ...] = ()


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
        self.videos = self._find_videos()
        self.hears = self._find_sound()
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

    def video(self, frames: int) -> Picture:
        """Arguments of its function for videos, for one of so many frames."""
        made = [self.picture(3 * number) for number in range(frames)]  # of one size
        if self.videos == (MOVING,):
            made = [plain_frame(self.config, number) for number in range(frames)]
        seen = [{name: one.numpy() for name, one in frame.items() if one is not None} for frame in made]
        rows, form = pack_frames(seen, frames, self.videos, 0, row_values(self.config))
        return unpack(form, torch.from_numpy(rows), torch.float64)

    def video_tokens(self, frames: int) -> int:
        """Placeholders of such a video."""
        with torch.no_grad():
            output = self.base.get_video_features(**self.video(frames), return_dict=True)
        return len(self.handover.take(output)[self.handover.names[0]])

    def _find_videos(self) -> tuple[str, ...]:
        """Arguments of its function for videos; empty where it has none that takes frames, or one with weights of its
        own, which a run without videos would change."""
        self.videos = tuple(sorted(video_arguments(type(self.base)) or ()))
        try:
            if self.videos and moving_placeholder(self.config) is not None and self.video_tokens(2):
                moving = self.base.get_video_features(**self.video(2), return_dict=True)
                own = self._reached(moving) - self._reached(self.encode(self.picture(0)))
                return () if own else self.videos
        except Exception:  # a function that takes other frames may fail anyhow
            pass
        return ()

    def _reached(self, output: Any) -> set[str]:
        """Names of parameters that an encoder's output depends on."""
        named = {name: one for name, one in self.model.named_parameters() if one.requires_grad}
        rows = self.handover.take(output)[self.handover.names[0]]
        found = torch.autograd.grad(rows.sum(), list(named.values()), allow_unused=True)
        return {name for name, gradient in zip(named, found, strict=True) if gradient is not None}

    @property
    def bins(self) -> int:
        """Values of a frame of sound."""
        return getattr(self.config.audio_config, "num_mel_bins", 128)

    def clip(self, frames: int) -> Picture:
        """Arguments of its function for sound, for a clip of so many frames."""
        random = torch.Generator().manual_seed(frames)
        return clip_arguments(self.base, torch.randn(frames, self.bins, dtype=torch.float64, generator=random))

    def clip_tokens(self, frames: int) -> int:
        """Placeholders of such a clip."""
        with torch.no_grad():
            return len(self.base.get_audio_features(**self.clip(frames), return_dict=True).pooler_output.flatten(0, -2))

    def _find_sound(self) -> bool:
        """Whether it has a function for sound that takes frames."""
        if getattr(self.config, "audio_config", None) is None or mask_name(self.base) is None:
            return False
        try:
            with staying_double():
                return self.clip_tokens(DUMMY_FRAMES) > 0
        except Exception:  # a function that takes other frames may fail anyhow
            return False

    def sample(
        self, pictures: Sequence[int], seed: int, videos: Sequence[int] = (), clips: Sequence[int] = ()
    ) -> TwinSample:
        """Pictures by their numbers, videos and clips by their frames."""
        counts, sounds = [self.video_tokens(frames) for frames in videos], [self.clip_tokens(n) for n in clips]
        ids, kinds = make_row(self.config, [self.tokens(number) for number in pictures], seed, sounds, counts)
        return TwinSample(ids, kinds, tuple(pictures), tuple(videos))

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
