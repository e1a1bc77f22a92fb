"""The work that every layout does: two model shapes, and batches of two samples with one image each."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dhp.data.sample.sample import Sample
from experiments.small import make_sample, save_model

SAMPLES, TEXT_TOKENS, TARGETS = 2, 48, 32
SIDES = {"1k": 32, "4k": 64, "9k": 96, "16k": 128}  # patches along one side of the image

# Matrices of the tower against those of the decoder, multiply-adds a patch (a decoder token is four patches):
# about 4.6 to 1, about 1.1 to 1, and 1 to 12.3 as in Qwen2.5-VL-32B, MLPs as wide, too.
# The tower's full attention comes on top and grows with the image.
TOWER = {"depth": 6, "hidden_size": 128, "intermediate_size": 384, "num_heads": 4, "fullatt_block_indexes": [5]}
DECODERS = {
    "vision-dominated": {"hidden_size": 256, "num_hidden_layers": 2, "intermediate_size": 384},
    "balanced": {"hidden_size": 320, "num_hidden_layers": 4, "intermediate_size": 768},
    "as 32B": {"hidden_size": 640, "num_hidden_layers": 8, "intermediate_size": 3456},
}
SMALL_SHAPES = ("vision-dominated", "balanced")


@dataclass(frozen=True)
class Run:
    """Steps of one batch. seconds: of each step that counts. loss: of the last one.

    peak_bytes: the most that activations took on a rank's device, and sent_bytes: what all ranks sent in a step; both
    None where only time was taken."""

    seconds: tuple[float, ...]
    loss: float
    peak_bytes: int | None = None
    sent_bytes: int | None = None


def make_model(folder: Path, shape: str) -> Path:
    """A Qwen2.5-VL of that shape with random weights."""
    return Path(save_model(folder / shape, DECODERS[shape], TOWER))


def make_batch(size: str) -> list[Sample]:
    """The samples of a step, with images of `size` patches each."""
    side = SIDES[size]
    return [make_sample(seed, (1, side, side), TEXT_TOKENS, TARGETS) for seed in range(SAMPLES)]


def count_tokens(samples: Sequence[Sample]) -> int:
    """Tokens of the decoder."""
    return sum(len(sample.input_ids) for sample in samples)
