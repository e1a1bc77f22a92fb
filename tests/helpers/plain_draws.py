"""What adapters draw in the plain model: its dropout by the tokens of each sample, which it is given alone."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

from dhp.core.batch import frame_patches
from dhp.core.draws import TokenKeys, draw_key, drawing, keys_of
from dhp.core.parameters import ADAPTER, AdapterSettings
from dhp.data.sample.sample import Sample
from dhp.models.family import Family
from dhp.models.lora import TokenDropout, adapted_modules
from dhp.models.tower import Tower

# By the encoder's function in the model: its part, and which of a sample's pictures it is given.
_ENCODES: dict[str, tuple[str, Callable[[Sample], list[int]]]] = {
    "get_image_features": ("vision", lambda sample: [n for n, s in enumerate(sample.video_seconds) if s is None]),
    "get_video_features": ("vision", lambda sample: [n for n, s in enumerate(sample.video_seconds) if s is not None]),
    "get_audio_features": ("audio", lambda sample: [*range(len(sample.clip_forms))]),
}


class PlainDraws:
    """The dropout of adapters in a plain model, of one run."""

    def __init__(self, model: nn.Module, family: Family, lora: Mapping[str, AdapterSettings], seed: int = 0):
        self._family, self._seed, self._sample, self._key = family, seed, None, 0
        self._draws = any(asked.dropout for asked in lora.values())
        if not self._draws:
            return
        for name, layer in adapted_modules(model):
            if isinstance(layer.lora_dropout[ADAPTER], nn.Dropout):
                layer.lora_dropout[ADAPTER] = TokenDropout(layer.lora_dropout[ADAPTER].p, name)
        for module in model.modules():
            for function in set(_ENCODES).intersection(dir(module)):
                setattr(module, function, partial(self._encode, function, getattr(module, function)))

    @contextmanager
    def of(self, sample: Sample, step: int, earlier: Sequence[Sample]) -> Iterator[None]:
        """In the block the model is given this sample of a step, which has had those earlier."""
        if not self._draws:
            yield
            return
        counts = Counter((one.dataset, one.position) for one in earlier)
        name = (sample.dataset, sample.position)
        self._sample, self._key = sample, draw_key(self._seed, step, *name, counts[name] + 1)
        with drawing(TokenKeys(keys_of([(self._key, 0, len(sample.input_ids))]))):
            yield
        self._sample = None

    def _encode(self, function: str, encode: Callable[..., Any], *args: Any, **named: Any) -> Any:
        if self._sample is None:  # in evaluation, or inside of another of them
            return encode(*args, **named)
        part, choose = _ENCODES[function]
        sample, self._sample = self._sample, None
        tower: Tower = self._family.parts[part]
        forms = sample.clip_forms if part == "audio" else sample.grids
        rows = [1 if tower.tile == 1 else sum(frame_patches(one)) for one in forms]
        runs = [(draw_key(self._key, number), 0, rows[number]) for number in choose(sample)]
        with drawing(TokenKeys(keys_of(runs), tower.merge_unit, tower.tile)):
            output = encode(*args, **named)
        self._sample = sample
        return output
