"""Data of a step and of generation, between processes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from numbers import Integral
from typing import Any

from torch import Tensor

from dhp.core.draws import DrawRun
from dhp.core.errors import ConfigError
from dhp.core.graph import Route
from dhp.core.preferences import Mark

Grid = tuple[int, int, int]  # (t, h, w) of an image or a video, in patches


@dataclass(frozen=True)
class ProcessorOutput:
    """A picture that is not a grid: what its image processor gave, without the numbers of the pixels.

    pixels: names and shapes of the arrays of pixels, which are sent as [rows, values], one after another. arrays: the
    other arguments of the encoder: name, dtype, shape and bytes of each. tokens: placeholders. written: what a prompt
    has in the picture's place."""

    pixels: tuple[tuple[str, tuple[int, ...]], ...]
    arrays: tuple[tuple[str, str, tuple[int, ...], bytes], ...]
    rows: int
    tokens: int
    written: str = ""


def frame_patches(grid: Grid | ProcessorOutput) -> tuple[int, ...]:
    """Patches of each frame of a picture. One that is no grid counts as one frame with all its rows."""
    if isinstance(grid, ProcessorOutput):
        return (grid.rows,)
    t, h, w = grid
    return (h * w,) * t


IGNORED = -100  # the label of a token that is not a target
VIDEO = 2  # the kind of a token in whose place a video goes; those of images have 1, text has 0
SOUND = 3  # the kind of a token in whose place sound goes


@dataclass(frozen=True)
class TokenRange:
    """`count` consecutive tokens of a segment (an image, a frame, a document), from its `first`-th on."""

    segment: int
    first: int
    count: int

    @property
    def end(self) -> int:
        return self.first + self.count


@dataclass(frozen=True)
class PositionRange:
    """How many positions a model knows. of_pictures: each token of a picture has one of its own, as text has; False:
    they share some (rotary positions by rows and columns)."""

    count: int
    of_pictures: bool


@dataclass(frozen=True)
class FeatureSettings:
    """Where features are cached. tower: hex digest of the weights and all else that turns patches into features."""

    folder: str
    tower: str


@dataclass(frozen=True)
class KeepSettings:
    """Where ranks write features. room_bytes: the most that each rank may add; None: no bound."""

    folder: str
    room_bytes: int | None = None


@dataclass(frozen=True, eq=False)
class Features:
    """Features of one picture.

    key: hex digest that they are cached under. about: of the picture, what a later reader needs as well.

    tensors: [tokens, width] by name, in the order of the picture's placeholders; None: nothing is cached yet."""

    key: str
    about: str
    tensors: Mapping[str, Tensor] | None = None


@dataclass(frozen=True)
class Bundle:
    """Named tensors that cross an edge together."""

    tensors: Mapping[str, Tensor]


@dataclass(frozen=True)
class StepInfo:
    """Global counts of a step, over all replicas and micro-batches.

    epoch: the one that the step begins in. done: epochs after the step, with a fraction.

    images: how many images and videos.

    tokens: of the decoder, without padding; padded_tokens: with it. target_tokens: those that have a target.

    total_weight: N of the objective, the sum of all samples' weights.

    vision_tokens: patches.

    skipped: one line for each sample left out.

    dist_ratio: DistRatio of vision's patches and of text's padded tokens over their ranks, by part.

    flops: useful operations of each part, forward, and backward as far as it is trained.

    data_s: seconds spent reading and decoding. measure_s: seconds spent on choosing its samples, which includes
    measuring their lengths.

    clips: of sound. cached_images: of the images and videos, those that no tower encoded, because their features were
    on disk. vision_tokens has their patches too, flops does not.

    sp_ratio: where ranks share rows, of all tokens the share that is divided over several ranks though its samples are
    no longer than a rank's even share of their row; None where none do.

    sample_digest: of which samples it has (`dhp.data.sampling.dataset.digest`); "": not known. rows: of its samples in
    their annotations (from 0, ascending), by dataset. order: [micro-batch][text replica], of each sample in the order
    of `TextInput.samples` its dataset and its row there, without those left out.

    work: what each shard of a part has to compute, relative to the part's others, by part.

    marks: as `order`, of preferences; (): there are none."""

    step: int
    epoch: int
    done: float
    samples: int
    images: int
    tokens: int
    target_tokens: int
    total_weight: float
    vision_tokens: int
    skipped: tuple[str, ...]
    padded_tokens: int
    dist_ratio: Mapping[str, float]
    flops: Mapping[str, int]
    data_s: float
    measure_s: float
    clips: int = 0
    cached_images: int = 0
    sp_ratio: float | None = None
    sample_digest: str = ""
    rows: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    order: tuple[tuple[tuple[tuple[str, int], ...], ...], ...] = ()
    work: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    marks: tuple[tuple[tuple[Mark, ...], ...], ...] = ()


@dataclass(frozen=True)
class RowRun:
    """Rows of a picture's features that one rank has, from row `first` of its output on. places: of each of them
    among the picture's, int64 [rows]."""

    rank: int  # of those that share the sequence
    first: int
    places: Tensor


@dataclass(frozen=True)
class PictureRows:
    """A picture whose features are to be cached: see `dhp.core.batch.Features`. runs: all of its rows."""

    key: str
    about: str
    runs: tuple[RowRun, ...]


@dataclass(frozen=True)
class UnreadPatches:
    """Patches that are still in a video's file: rows of them, int64, in the image processor's order.

    video: what the reader of the data knows it by (`dhp.data.media.frames.LongVideo`)."""

    video: Any
    rows: Tensor


@dataclass(frozen=True)
class VisionInput:
    """One shard's input of an encoder in a micro-batch; patches in tower order. Of audio, a frame is a patch.

    pixels: [patches, values]; positions: of each patch, as the tower takes them, [patches, …].

    window_lengths: patches of this shard's windows.

    segment_lengths: patches of the full-attention segments of all shards that share the sequence.

    shards: for each of these (Ulysses innermost), what it holds of the segments, in the order of its rows: (segment,
    first patch, patches).

    rows: merged rows for each text shard that gets any, in order. Rows beyond their sum come from a dummy window and
    are dropped. order: the merged rows in the order in which they are handed over, int64; None: as they come.

    forms: of its pictures, in order, where the tower takes pictures whole. calls: which of them, by number, each call
    of the tower takes; one without any takes a dummy picture. Ranks that gather weights for each call have equally many
    calls, whatever pictures they have.

    to_keep: of all shards that share the sequence, pictures whose features are to be written to disk.

    unread: where some pixels are still to be read, all of them, piece by piece; `pixels` has no columns then. Ranks
    never see that.

    draws: where adapters draw, the keys of its patches, in order (`dhp.core.draws`); of pictures that the tower takes
    whole, a run each."""

    pixels: Tensor
    positions: Tensor
    window_lengths: tuple[int, ...]
    segment_lengths: tuple[int, ...]
    shards: tuple[tuple[tuple[int, int, int], ...], ...]
    rows: tuple[int, ...]
    order: Tensor | None = None
    forms: tuple[ProcessorOutput, ...] = ()
    calls: tuple[tuple[int, ...], ...] = ()
    to_keep: tuple[PictureRows, ...] = ()
    unread: tuple[Tensor | UnreadPatches, ...] = ()
    draws: tuple[DrawRun, ...] = ()


@dataclass(frozen=True)
class TextInput:
    """One text shard's tokens in a micro-batch: a replica's rows, or a sequence rank's share of its one row.

    tensors: the model's own arguments (input_ids, position_ids, …), rows right-padded or packed into one; and the
    objective's columns, an element a token (`dhp.objectives.objective.Objective.columns`).

    lengths: tokens of each sample of the packed row, all ranks' together; None where rows are padded.

    shards: where ranks share the row, for each of them (Ulysses innermost), what it holds of the samples, in the order
    of its tokens: (sample, first token, tokens).

    placements: by encoder of which the rows hold anything: for each of its tokens, in order, its row among those
    received from the encoder's shards, one shard after another, and then those of `cached`.

    total_weight: N of the step's objective, not of these rows.

    samples: tokens of each sample of the rows, in order, without padding. weights: of each of them in N. marks: of each
    of them, where they are preferences.

    cached: rows of pictures whose features were on disk, by the name of the vision part's tensor.

    blocks: tokens with the same number see each other both ways, -1: none; int64, of the rows, or of all samples that
    ranks share. None where the family has no blocks.

    segment_calls: how often layers that take each sample by itself are called at least, the same on all ranks.

    draws: where adapters draw, the keys of its tokens, in order, those that fill rows up included (`dhp.core.draws`).

    objective: of samples of someone's own loop, an `Objective`; None: the run's.
    """

    tensors: dict[str, Tensor]
    lengths: tuple[int, ...] | None
    placements: Mapping[str, Tensor]
    total_weight: float
    samples: tuple[int, ...] = ()
    cached: Mapping[str, Tensor] = field(default_factory=dict)
    shards: tuple[tuple[tuple[int, int, int], ...], ...] = ()
    blocks: Tensor | None = None
    segment_calls: int = 0
    weights: tuple[float, ...] = ()
    draws: tuple[DrawRun, ...] = ()
    marks: tuple[Mark, ...] = ()
    objective: Any = None


@dataclass(frozen=True)
class StepData:
    """One step, sharded over the ranks.

    work: for each part, [micro-batch][shard]; for an encoder's later stages under a name of its own
    (`dhp.core.graph.later`). routes: for each part whose rows go where the data say, one for each micro-batch."""

    info: StepInfo
    work: Mapping[str, tuple[tuple[Any, ...], ...]]
    routes: Mapping[str, tuple[Route, ...]]


@dataclass(frozen=True)
class Batch:
    """`StepData` as the driver has it: refs of what ranks receive. info: its `StepInfo`. work, routes: as there."""

    info: Any
    work: Mapping[str, Sequence[Sequence[Any]]]
    routes: Mapping[str, Sequence[Route]]


@dataclass(frozen=True)
class Sampling:
    """How new tokens are sampled, and when generation stops.

    stop: tokens that end an answer, of which it has the last. temperature: what logits are divided by before one is
    drawn; 0: the likeliest token is taken. top_k: of the likeliest only so many; 0: all. top_p: of the likeliest as few
    as have that share of all together. seed: of the draws; a prompt's number is added to it."""

    max_new_tokens: int
    stop: tuple[int, ...] = ()
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        whole = all(isinstance(one, Integral) for one in (self.max_new_tokens, self.top_k, self.seed))
        if whole and self.max_new_tokens > 0 <= self.top_k and 0 <= self.temperature < inf and 0 < self.top_p <= 1:
            return
        raise ConfigError(
            f"{self}: max_new_tokens is above 0, top_k 0 or more, both and the seed whole numbers; temperature is 0 or "
            "more, and 0 < top_p <= 1"
        )


@dataclass(frozen=True)
class PromptInput:
    """A prompt as one text shard gets it.

    row: all of its tokens but the last, as ranks share a row in training; without target. What a rank without any of
    them computes is discarded.

    tokens: how many of the prompt are in the row, on all ranks together. last: its last token; None: the replica has no
    prompt. position: of that token as the model takes it, [..., 1, 1]. next_position: of the first new token: one more
    than the largest of the prompt, which its number of tokens does not tell."""

    row: TextInput
    tokens: int
    last: int | None
    position: Tensor
    next_position: int | float
    sampling: Sampling


@dataclass(frozen=True)
class Answer:
    """One rank's report of an answered prompt; all ranks of a replica report the same tokens.

    token_ids: the new ones, the one that ended it included. prompt_tokens: those of the prompt. log_probabilities: of
    the new ones by the model, whatever the temperature, on the replica's first rank.

    prefill_s: seconds to the first token. seconds: to the last. cache_bytes: of keys and values on this rank at the
    end. peak_bytes: the most that the process had: of the GPU's memory, or on a CPU of the host's."""

    token_ids: tuple[int, ...] = ()
    prompt_tokens: int = 0
    prefill_s: float = 0.0
    seconds: float = 0.0
    cache_bytes: int = 0
    peak_bytes: int = 0
    log_probabilities: tuple[float, ...] = ()


def is_greedy(sampling: Sampling) -> bool:
    """Whether nothing is drawn."""
    return sampling.temperature == 0.0


@dataclass(frozen=True)
class LogitRule:
    """A logit is softcap × tanh(factor × output / softcap) / temperature; without a soft cap, factor × output /
    temperature.

    Gemma Team 2024, "Gemma 2", section 2; Granite and Cohere have factors. Temperatures are of someone's own loop."""

    factor: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0


CHUNK_ROWS = 2048  # of a head's logits that exist at a time
