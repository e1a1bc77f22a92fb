"""The audio tower of Qwen3-Omni.

Convolutions see a clip in chunks of a second at most, layers attend to windows of several chunks. The library fills
pads chunks to the longest one of a call, and the padding behind a short chunk shows in its last row. So a clip records
how long the longest chunk of its own sample is, and gives the same rows whatever other clips a call has."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dhp.config.parts import resolved
from dhp.config.schema import PartConfig
from dhp.core.batch import Grid, ProcessorOutput
from dhp.core.draws import current_keys, drawing
from dhp.core.errors import ConfigError
from dhp.core.graph import HIDDEN_STATES
from dhp.models.contract.random_pictures import arrays_of
from dhp.models.decoder import having
from dhp.models.flops import AudioWork
from dhp.models.processor import CHUNK, clip_forms, count_tokens
from dhp.models.tower import ChunkEnd, Tower, TowerInputs, leave_forward
from dhp.models.types import Chunk, ImageLayout, LayerParts, held_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel


PATH = "model.audio_tower"
AUDIO_EMBEDDINGS = "audio_embeddings"  # the tensor whose rows replace those of a clip's placeholders
_DUMMY_FRAMES = 8
_BEFORE, _BEHIND = ("conv2d1", "conv2d2", "conv2d3", "conv_out"), ("ln_post", "proj1", "proj2")


class AudioTower(Tower):
    """Each clip is encoded by one rank; clips are divided among the ranks of a sequence."""

    modules = (PATH,)
    projector = (f"{PATH}.proj1", f"{PATH}.proj2")
    tensors = (AUDIO_EMBEDDINGS,)
    position_columns = 0
    heads = 1
    divisible = True
    takes_attention, shares_whole = False, True
    dummy_patches = _DUMMY_FRAMES
    tile = 1  # a clip has one key, and its layers see what convolutions make of it

    def __init__(self, config: Any):
        super().__init__(config)
        audio = config.audio_config
        self.patch_dim = audio.num_mel_bins
        self.layers = LayerParts(
            f"{PATH}.layers",
            tuple(f"self_attn.{name}_proj" for name in ("q", "k", "v", "out")),
            ("fc1",),
            ("audio",) * audio.encoder_layers,
        )
        self.work: AudioWork = _count_work(audio, count_tokens(2 * audio.n_window, config))

    @property
    def dummy_form(self) -> ProcessorOutput:
        return clip_forms([_DUMMY_FRAMES], self.config)[0]

    def uneven_axes(self, asked: PartConfig) -> tuple[str, ...]:
        return ()  # clips are shared out, not heads

    def check(self, asked: PartConfig) -> None:
        for degree in ("tensor", "ring"):
            value = resolved(getattr(asked, degree))
            if value > 1:
                raise ConfigError(
                    f"audio.{degree}={value} with a {self.config.model_type} model: its audio tower takes clips whole, "
                    "and no matrix of it is cut. Set audio.parallelism=sequence, whose actors share the clips, or data"
                )
        self.check_backend("audio", asked)

    def image_layout(self, grid: Grid | ProcessorOutput) -> ImageLayout:
        if not isinstance(grid, ProcessorOutput):
            raise TypeError(f"a clip is described by its form, not by a grid {grid}")
        nowhere = torch.zeros(grid.rows, 0, dtype=torch.long)
        return ImageLayout(torch.arange(grid.tokens), 1, (grid.rows,), (grid.rows,), nowhere, (grid.tokens,), grid)

    def absent(self, chunks: Sequence[Chunk]) -> tuple[str, ...]:
        first, last = any(chunk.first for chunk in chunks), any(chunk.last for chunk in chunks)
        others = (*(() if first else _BEFORE), *(() if last else _BEHIND))
        layers = (f"layers.{layer}" for layer in self.whole.layers if layer not in held_layers(chunks))
        return tuple(f"{PATH}.{module}" for module in (*layers, *others))

    def encode(self, model: PreTrainedModel, inputs: TowerInputs) -> dict[str, Tensor]:
        """Encode rows of frames, one clip after another."""
        return self.run(model, self.whole, inputs)

    def run(self, model: PreTrainedModel, chunk: Chunk, inputs: TowerInputs) -> dict[str, Tensor]:
        """See `Tower`. Clips whose samples have chunks of one length go through the tower together; the states between
        chunks are those of one call behind those of another."""
        forms = [[inputs.forms[n] for n in numbers] or [self.dummy_form] for numbers in inputs.calls]
        keys = current_keys()
        if chunk.first:
            made = self._begin(model, chunk, inputs, forms)
        else:
            assert inputs.hidden is not None
            counts = [sum(form.tokens for form in of_call) for of_call in forms]
            states = zip(inputs.hidden.split(counts), forms, strict=True)
            made = []
            for numbers, (own, of_call) in zip(inputs.calls, states, strict=True):
                with drawing(keys and keys.of_call(numbers)):
                    made.append(self._go_on(model, chunk, own, of_call))
        if not chunk.last:
            return {HIDDEN_STATES: torch.cat(made)}
        return {AUDIO_EMBEDDINGS: torch.cat(self._by_clip(inputs, made, forms))}

    def _begin(
        self, model: PreTrainedModel, chunk: Chunk, inputs: TowerInputs, forms: Sequence[Sequence[ProcessorOutput]]
    ) -> list[Tensor]:
        """Each call's rows behind the first chunk, from frames."""
        clips = inputs.pixels.split([form.rows for form in inputs.forms])
        made, keys = [], current_keys()
        for numbers, of_call in zip(inputs.calls, forms, strict=True):
            own = [clips[n] for n in numbers] or [self.dummy_pixels(inputs.pixels)]
            with drawing(keys and keys.of_call(numbers)):
                made.append(self._encode_together(model, chunk, own, of_call))
        return made

    def _go_on(self, model: PreTrainedModel, chunk: Chunk, states: Tensor, forms: Sequence[ProcessorOutput]) -> Tensor:
        """One call's rows behind a later chunk. The library's forward begins with convolutions, so that its layers, and
        what it does behind them, are called here."""
        tower = model.get_submodule(PATH)
        windows = self._plan([form.rows for form in forms], _longest_chunk(forms[0]), states.device).windows
        longest = int(windows.diff().max())
        for layer in chunk.layers:
            states = tower.get_submodule(f"layers.{layer}")(states, windows, max_seqlen=longest)[0]
        return tower.proj2(tower.act(tower.proj1(tower.ln_post(states)))) if chunk.last else states

    def _by_clip(
        self, inputs: TowerInputs, made: Sequence[Tensor], forms: Sequence[Sequence[ProcessorOutput]]
    ) -> list[Tensor]:
        """Rows of each clip in the order of `inputs.forms`, then those of dummies."""
        found, dummies = dict[int, Tensor](), list[Tensor]()
        for numbers, rows, of_call in zip(inputs.calls, made, forms, strict=True):
            if not numbers:
                dummies.append(rows)
                continue
            found |= dict(zip(numbers, rows.split([form.tokens for form in of_call]), strict=True))
        return [*(found[n] for n in range(len(inputs.forms))), *dummies]

    def calls(
        self, forms: Sequence[ProcessorOutput], even: bool = False, alone: bool = False
    ) -> tuple[tuple[int, ...], ...]:
        if alone:
            return tuple((number,) for number in range(len(forms)))
        groups: dict[int, list[int]] = defaultdict(list)
        for number, form in enumerate(forms):
            groups[_longest_chunk(form)].append(number)
        return tuple(map(tuple, groups.values()))

    def _encode_together(
        self, model: PreTrainedModel, chunk: Chunk, clips: Sequence[Tensor], forms: Sequence[ProcessorOutput]
    ) -> Tensor:
        """The rows of clips that one call takes, behind the first chunk: the library's own forward, which is left at
        the first layer behind it."""
        plan = self._plan([form.rows for form in forms], _longest_chunk(forms[0]), clips[0].device)
        rows = torch.cat([*clips, clips[0].new_zeros(1, clips[0].shape[1])])  # the last fills up
        tower = model.get_submodule(PATH)
        own = [tower.get_submodule(f"layers.{layer}") for layer in chunk.layers]
        others = {} if chunk.last else {"layers": [*own, leave_forward]}
        with having(tower, **others):
            try:
                output = tower(
                    padded_feature=rows[plan.frames].transpose(1, 2),
                    chunk_lengths=plan.chunks,
                    valid_indices=plan.valid,
                    cu_seqlens=plan.windows,
                    return_dict=True,
                )
            except ChunkEnd as end:
                return end.states
        return output.last_hidden_state

    def use_attention(self, model: PreTrainedModel, name: str) -> None:
        """Keeps the library's attention: windows are short."""

    def call_modules_once(self, model: PreTrainedModel) -> None:
        """See `Tower`: the library convolves so many chunks of audio at a time, to save memory."""
        model.get_submodule(PATH).conv_chunksize = sys.maxsize

    def _plan(self, frames: Sequence[int], longest: int, device: torch.device) -> _Plan:
        """The layout of clips of so many frames in the tower, chunks padded to `longest`."""
        audio, most = self.config.audio_config, 2 * self.config.audio_config.n_window
        own = [[min(most, count - first) for first in range(0, count, most)] for count in frames]
        chunks = torch.tensor([length for of_clip in own for length in of_clip])
        places, inside = torch.arange(longest), torch.arange(longest) < chunks[:, None]
        starts = chunks.cumsum(0) - chunks
        gathered = torch.where(inside, starts[:, None] + places, int(chunks.sum()))
        after = count_tokens(longest, self.config)
        tokens = torch.tensor([count_tokens(int(length), self.config) for length in chunks])
        valid = (torch.arange(after) < tokens[:, None]).flatten().nonzero()[:, 0]
        window = after * (audio.n_window_infer // most)
        ends = [0]
        for count in frames:
            left = count_tokens(count, self.config)
            while left > 0:
                ends.append(ends[-1] + min(window, left))
                left -= window
        windows = torch.tensor(ends, dtype=torch.int32)
        return _Plan(_moved(gathered, device), chunks, _moved(valid, device), windows)


@dataclass(frozen=True)
class _Plan:
    """frames: which row of the clips each place of a chunk has, [chunks, longest]. chunks: frames of each. valid: of
    all chunks' rows behind the convolutions, those that are no padding. windows: cumulative lengths. Chunks and windows
    stay on the host, which reads them: on the device it would wait for them in every layer."""

    frames: Tensor
    chunks: Tensor
    valid: Tensor
    windows: Tensor


def _longest_chunk(form: ProcessorOutput) -> int:
    """Frames to which the chunks of a clip are padded."""
    return int(arrays_of(form)[CHUNK][0])


def _moved(indices: Tensor, device: torch.device) -> Tensor:
    """Copy through pinned memory: from pageable memory a transfer would wait for all that is queued on the device."""
    return indices if device.type == "cpu" else indices.pin_memory().to(device, non_blocking=True)


def _count_work(audio: Any, chunk_tokens: int) -> AudioWork:
    width, channels, inner = audio.d_model, audio.downsample_hidden_size, audio.encoder_ffn_dim
    bins = [audio.num_mel_bins]
    for _ in range(3):
        bins.append((bins[-1] + 1) // 2)
    convolutions = 9 * channels * channels * (bins[2] / 4 + bins[3] / 8)
    return AudioWork(
        frame=round(9 * channels * bins[1] / 2),
        convolved=round(convolutions),
        joined=bins[3] * channels * width,
        token=audio.encoder_layers * width * (4 * width + 2 * inner),
        embedding=width * (width + audio.output_dim),
        pair=audio.encoder_layers * 2 * width,
        window=chunk_tokens * (audio.n_window_infer // (2 * audio.n_window)),
    )
