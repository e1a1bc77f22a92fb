"""Makes rows of tokens from a configuration alone."""

from collections.abc import Mapping, Sequence
from inspect import isfunction, signature
from itertools import zip_longest
from types import MethodType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from dhp.core.batch import IGNORED, SOUND, VIDEO, ProcessorOutput
from dhp.core.errors import ModelError
from dhp.models.contract.random_pictures import arrays_of
from dhp.models.types import BlockRule

# How tokens of an image see each other both ways (dhp.parallel.attention.visibility.BlockRule).
_BLOCKS: dict[str, BlockRule] = {
    "gemma3": "bounded",
    "shieldgemma2": "bounded",
    "gemma4": "windowed",
    "gemma4_unified": "bounded",
    "molmo2": "bounded",
    "paligemma": "free",
}
_SOME = frozenset({"gemma4", "gemma4_unified"})  # some of whose models have blocks
# Families in which tokens of all images of a sample see each other, not those of each image alone.
_ONE_BLOCK = frozenset({"molmo2"})
# Families in which all tokens before an answer see each other (Beyer et al. 2024, PaliGemma, section 3).
_PREFIX = frozenset({"paligemma"})
# Families whose MLPs take as an argument which of all tokens are an image's, and route these otherwise.
_MLPS_WITH_KINDS = frozenset({"ernie4_5_vl_moe"})
# Families whose every layout is in the tests' matrix, besides those with an adapter of their own.
_DECLARED = frozenset({
    "aya_vision", "cohere2_vision", "ernie4_5_vl_moe", "gemma3", "gemma4", "idefics3", "internvl", "llava",
    "llava_next", "llava_onevision", "minicpmv4_6", "mistral3", "ovis2", "paligemma", "smolvlm",
})  # fmt: skip


def is_declared(config: Any) -> bool:
    """Whether tests compare the family with the plain model."""
    return config.model_type in _DECLARED


def block_rule(config: Any) -> BlockRule | None:
    """The rule of a family's blocks; None where tokens of an image see each other as any others do."""
    rule = _BLOCKS.get(config.model_type)
    if (
        config.model_type in _SOME
        and getattr(config.get_text_config(), "use_bidirectional_attention", None) != "vision"
    ):
        return None
    return rule


def sees_prefix(config: Any) -> bool:
    """Whether all tokens before the first one to be learned see each other."""
    return config.model_type in _PREFIX


def joins_images(config: Any) -> bool:
    """Whether all images of a sample are one block."""
    return config.model_type in _ONE_BLOCK


def mlps_need_rows(config: Any) -> bool:
    """Whether an MLP computes all tokens at once or none."""
    return config.model_type in _MLPS_WITH_KINDS


def token_types(config: Any, kinds: Tensor, labels: Tensor) -> Tensor:
    """The plain model's type of each token of one sample, [1, tokens]: its kind, or, where a prefix is seen both ways,
    whether it is behind that."""
    if not sees_prefix(config):
        return kinds
    targets = torch.cat([labels[0, 1:], labels.new_full((1,), IGNORED)])  # nothing predicts the first token
    return (~find_prefixes(targets, [len(targets)])).long()[None]


def causal_types(config: Any, kinds: Tensor) -> Tensor:
    """Types of so many tokens each of which sees those before it alone, as `kinds`."""
    return torch.ones_like(kinds) if sees_prefix(config) else torch.zeros_like(kinds)


def find_prefixes(targets: Tensor, lengths: Sequence[int]) -> Tensor:
    """Which tokens come before all that is to be learned in their sample, bool [tokens]. targets: int64 [tokens], what
    each should predict; lengths: of the samples."""
    learned = [(sample != IGNORED).cumsum(0) for sample in targets.split(list(lengths))]
    # The token that predicts the first of an answer is the last one before it.
    return torch.cat([(count == 0) | ((count == 1) & (count.diff(prepend=count[:1] * 0) == 1)) for count in learned])


def first_position(config: Any) -> int:
    """Where a family begins to count the tokens of a row."""
    return 1 if config.model_type == "paligemma" else 0


# The argument that marks the tokens of pictures, under the names that models give it.
KINDS = ("mm_token_type_ids", "token_type_ids", "moe_mm_token_type_ids")


def placeholder(config: PreTrainedConfig) -> int | None:
    """The placeholder token of images."""
    for name in ("image_token_id", "image_token_index", "image_patch_id"):
        if isinstance(getattr(config, name, None), int):
            return getattr(config, name)
    return None


def moving_placeholder(config: PreTrainedConfig) -> int | None:
    """The placeholder token of videos, which need not be that of images."""
    found = (getattr(config, name, None) for name in ("video_token_id", "video_token_index"))
    return next((one for one in found if isinstance(one, int)), None)


def make_row(
    config: PreTrainedConfig, counts: Sequence[int], seed: int, sounds: Sequence[int] = (), videos: Sequence[int] = ()
) -> tuple[Tensor, Tensor]:
    """A conversation with images of so many tokens, each followed by a clip of `sounds` as far as there are any, and
    then videos: ids and kinds (1 at images, 2 at videos, 3 at sound), [1, tokens] each. Raises ModelError for images
    without a placeholder."""
    if any(counts) and placeholder(config) is None:
        raise ModelError(
            f"model_type {config.model_type!r}: its configuration names no token that stands for an image's rows in a "
            "prompt. Set image_token_id in the model's config.json"
        )
    generator = torch.Generator().manual_seed(seed)
    taken = set(_numbers(config))
    vocabulary = min(config.get_text_config().vocab_size, 512)
    plain = torch.tensor([n for n in range(3, vocabulary) if n not in taken])
    text = lambda n: plain[torch.randint(len(plain), (n,), generator=generator)].tolist()
    begin, end = ([n] if isinstance(n, int) else [] for n in _around(config))
    ids, kinds = text(4), [0] * 4
    image, sound = (begin, placeholder(config), end, 1), _sound(config) if sounds else None
    shown = [(count, around) for pair in zip_longest(counts, sounds) for count, around in zip(pair, (image, sound))]
    shown += [(count, (begin, moving_placeholder(config), end, VIDEO)) for count in videos]
    for count, around in shown:
        if count is None:
            continue
        begin, token, end, kind = around
        tail = text(3)
        ids += begin + [token] * count + end + tail
        kinds += [0] * len(begin) + [kind] * count + [0] * len(end + tail)
    tail = text(5)
    return torch.tensor([ids + tail]), torch.tensor([kinds + [0] * 5])


def _around(config: PreTrainedConfig) -> tuple[Any, Any]:
    """Tokens before and behind an image."""
    shared = getattr(config, "visual_indicator_token_ids", None)
    if shared:
        return shared[0], shared[1]
    for names in (("vision_start_token_id", "vision_end_token_id"), ("image_start_token_id", "image_end_token_id")):
        if isinstance(getattr(config, names[0], None), int):
            return getattr(config, names[0]), getattr(config, names[1], None)
    return None, None


def _sound(config: PreTrainedConfig) -> tuple[list[int], int, list[int], int]:
    begin = getattr(config, "audio_start_token_id", None)
    around = ([], []) if begin is None else ([begin], [_audio_end(config)])
    return around[0], config.audio_token_id, around[1], SOUND


def _audio_end(config: PreTrainedConfig) -> int:
    """The token behind a clip; some configurations do not name it, and the one after the first is it."""
    end = getattr(config, "audio_end_token_id", None)
    return config.audio_start_token_id + 1 if end is None else end


def _numbers(config: PreTrainedConfig) -> list[int]:
    found = []
    for section in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        for name, value in vars(section).items() if section is not None else ():
            if name.endswith(("_id", "_ids", "_index")):
                found += [n for n in (value if isinstance(value, list | tuple) else [value]) if isinstance(n, int)]
    return found


def kinds_for(forward: Any, kinds: Tensor) -> dict[str, Tensor]:
    """The arguments of `forward` that say which tokens are pictures'."""
    return {name: kinds for name in KINDS if name in signature(forward).parameters}


def positions(
    base: type[nn.Module] | None,
    config: PreTrainedConfig,
    ids: Tensor,
    kinds: Tensor,
    inside: Tensor,
    pictures: Mapping[str, Tensor | None],
    forms: Sequence[ProcessorOutput] = (),
    published: bool = True,
) -> Tensor:
    """Rotary positions as the model's own `get_rope_index` has them; counted through where it has none.

    inside: bool, false at padding. pictures: arguments that tell of the pictures' sizes; forms: of those that are no
    grids. published: what is behind a video follows its greatest position, as its makers trained."""
    if not hasattr(base, "get_rope_index"):
        return (torch.arange(ids.shape[1]) + first_position(config)).expand_as(ids).contiguous()
    model = SimpleNamespace(config=config)
    for name, method in _methods(base):
        setattr(model, name, method.__func__ if isinstance(method, staticmethod) else MethodType(method, model))
    vision = getattr(config, "vision_config", None)
    model.spatial_merge_size = getattr(vision, "spatial_merge_size", None)  # which some keep on the model
    asked = signature(base.get_rope_index).parameters
    given: dict[str, Any] = {"mm_token_type_ids": kinds, "attention_mask": inside.long(), **pictures}
    each = [arrays_of(form) for form in forms]
    sizes = [name for name in (each or [{}])[0] if name in asked]
    given |= {name: torch.from_numpy(np.concatenate([one[name] for one in each])) for name in sizes}
    found = base.get_rope_index(model, input_ids=ids, **{n: value for n, value in given.items() if n in asked})[0]
    return _follow_videos(found, kinds, inside) if published else found


def _methods(base: type[nn.Module]) -> list[tuple[str, Any]]:
    """Functions of the class and of those above it, but torch's and the library's general ones."""
    theirs = [one for one in base.__mro__ if one.__module__.startswith(base.__module__)]
    return [
        (name, one)
        for kind in reversed(theirs)
        for name, one in vars(kind).items()
        if isfunction(one) or isinstance(one, staticmethod)
    ]


def _follow_videos(found: Tensor, kinds: Tensor, inside: Tensor) -> Tensor:
    """Move what is behind each video to its greatest position and one on (Qwen2-VL, section 2.1: "positions begin by
    incrementing the maximum position ID of the preceding modality"), where the library begins by its height and width.
    found: [3, rows, tokens]."""
    moved = found.clone()
    for row in (kinds == VIDEO).any(-1).nonzero().flatten().tolist():
        tokens = int(inside[row].sum())
        is_video = (kinds[row, :tokens] == VIDEO).long()
        ends = (is_video.diff() == -1).nonzero().flatten() + 1  # where something is behind a video
        for end in ends.tolist():
            first = end - int(is_video[:end].flip(0).cumprod(0).sum())
            behind = moved[:, row, end:tokens]
            behind += moved[:, row, first:end].max() + 1 - behind[:, 0].min()
    return moved


def differs_behind_videos(base: type[nn.Module] | None, config: PreTrainedConfig) -> bool:
    """Whether the installed library puts what is behind a video elsewhere than the model's makers did."""
    merge = getattr(getattr(config, "vision_config", None), "spatial_merge_size", None)
    if merge is None or not hasattr(base, "get_rope_index"):
        return False
    per_step = getattr(config.vision_config, "temporal_merge_size", 1)
    kinds = torch.tensor([[0, *[VIDEO] * 8, 0]])
    pictures = {"video_grid_thw": torch.tensor([[8 * per_step, merge, merge]]), "second_per_grid_ts": torch.ones(1)}
    given = (base, config, torch.zeros_like(kinds), kinds, torch.ones_like(kinds, dtype=torch.bool), pictures)
    return not torch.equal(positions(*given), positions(*given, published=False))


def generic_name(name: str, layers: str) -> str:
    """A parameter's name without the number of the layer in which it is. layers: the path of the list, with a dot."""
    inside = name.removeprefix(layers)
    return name if inside == name else f"{layers}*.{inside.partition('.')[2]}"
