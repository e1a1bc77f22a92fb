"""Trains a small SigLIP and LLaVA's projector to show a picture in the decoder's own words: plain PyTorch.

Each patch becomes the decoder's embedding of a word: every second one the colour's, the others the shape's. A decoder
that has read such words learns in few steps to answer questions about them."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from measure import COLORS, SHAPES
from PIL import Image
from prepare import answer_of, made_whole, question_of, read_rows
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoTokenizer, SiglipImageProcessor, SiglipVisionConfig, SiglipVisionModel

SIDE, PATCH, WIDTH = 64, 16, 128
BATCH, RATE, SHIFT = 32, 1e-3, 8
PROJECTOR = "projector.safetensors"
WORDS = (*COLORS, *SHAPES)
UNKNOWN = -1  # a word of a picture that no question tells
CONFIG = SiglipVisionConfig(
    hidden_size=WIDTH, intermediate_size=4 * WIDTH, num_hidden_layers=4, num_attention_heads=4, image_size=SIDE,
    patch_size=PATCH,
)  # fmt: skip


class Projector(nn.Module):
    """As LLaVA has it."""

    def __init__(self, width: int):
        super().__init__()
        self.linear_1, self.linear_2 = nn.Linear(WIDTH, width), nn.Linear(width, width)

    def forward(self, states: Tensor) -> Tensor:
        return self.linear_2(F.gelu(self.linear_1(states)))


class Describer(nn.Module):
    """The tower, the projector, and the decoder's embeddings [words, width] that they should give.

    LLaVA reads the states before the tower's last layer, and so does this."""

    def __init__(self, embeddings: Tensor):
        super().__init__()
        self.tower, self.projector = SiglipVisionModel(CONFIG), Projector(embeddings.shape[1])
        self.register_buffer("embeddings", embeddings, persistent=False)
        self.scale = float(embeddings.norm(dim=1).mean()) ** 2

    def forward(self, pictures: Tensor) -> tuple[Tensor, Tensor]:
        """Projected patches [pictures, patches, width], and how near each is to each word."""
        found = self.projector(self.tower(pictures, output_hidden_states=True).hidden_states[-2])
        near = -torch.cdist(found.flatten(0, 1), self.embeddings).square() * 8 / self.scale
        return found, near.unflatten(0, found.shape[:2])

    def loss(self, pictures: Tensor, words: Tensor) -> Tensor:
        """words: of each patch [pictures, patches]."""
        found, near = self(pictures)
        known = words != UNKNOWN
        apart = (found[known] - self.embeddings[words[known]]).square().sum(-1).mean() / self.scale
        return F.cross_entropy(near[known], words[known]) + apart / 2


class Pictures:
    """Of a file, with the words of each patch, as far as its questions tell them."""

    def __init__(self, folder: Path, name: str):
        told: dict[str, list[int]] = {}
        for one in read_rows(folder / f"{name}.jsonl"):
            words = told.setdefault(str(one["image"]), [UNKNOWN, UNKNOWN])
            for word in told_by(question_of(one), answer_of(one)):
                words[word in SHAPES] = WORDS.index(word)
        pixels = [np.asarray(Image.open(folder / path).convert("RGB")) for path in told]
        self.pixels = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2) / 127.5 - 1.0
        self.words = torch.tensor(list(told.values()))[:, torch.arange((SIDE // PATCH) ** 2) % 2]


def told_by(question: str, answer: str) -> list[str]:
    """The words that a question and its answer say of a picture."""
    if answer in WORDS:
        return [answer]
    asked = re.findall(r"\w+", question)
    negated = "no" in asked or "not" in asked
    return [word for word in asked if word in WORDS] if (answer == "yes") != negated else []


def embeddings_of(decoder: Path, words: Sequence[str]) -> Tensor:
    """The decoder's embeddings of the words' first tokens, [words, width]."""
    tokenizer = AutoTokenizer.from_pretrained(decoder, trust_remote_code=False)
    ids = [tokenizer(f" {word}").input_ids[0] for word in words]
    with safe_open(decoder / "model.safetensors", "pt") as file:
        return file.get_tensor("model.embed_tokens.weight")[ids].float()


def varied(pictures: Tensor) -> Tensor:
    """Mirrored and moved at random. Colours and names of shapes stay right."""
    shifts = (random.randint(-SHIFT, SHIFT), random.randint(-SHIFT, SHIFT))
    pictures = pictures.roll(shifts, (-2, -1))
    axes = [axis for axis in (-2, -1) if random.random() < 0.5]
    return pictures.flip(axes) if axes else pictures


def train_tower(out: Path, data: Path, decoder: Path, epochs: int, seed: int) -> None:
    """Write the tower, with the projector in it. Goes on where it was stopped."""
    random.seed(seed)
    torch.manual_seed(seed)
    train, test = Pictures(data, "train"), Pictures(data, "test")
    describer = Describer(embeddings_of(decoder, WORDS))
    optimizer = torch.optim.AdamW(describer.parameters(), lr=RATE, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, RATE, epochs * -(-len(train.pixels) // BATCH), pct_start=0.1
    )
    parts = {"describer": describer, "optimizer": optimizer, "schedule": schedule}
    state, begun = out.with_name(f"{out.name}.state.pt"), 0
    if state.exists():
        held = torch.load(state, weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(held[name])
        begun = held["epochs"]
        print(f"the tower goes on after epoch {begun}", flush=True)
    for epoch in range(begun, epochs):
        started = time.perf_counter()
        random.seed(seed + epoch)
        torch.manual_seed(seed + epoch)
        loss = _epoch(describer, optimizer, schedule, train)
        color, shape = rightly(describer, test)
        told = f"loss {loss:.3f}  test: colours {color:.1%}, shapes {shape:.1%}"
        print(f"tower, epoch {epoch + 1}/{epochs}  {told}  {time.perf_counter() - started:.1f} s", flush=True)
        partial = state.with_suffix(".partial")
        torch.save({name: part.state_dict() for name, part in parts.items()} | {"epochs": epoch + 1}, partial)
        partial.replace(state)
    with made_whole(out) as folder:
        describer.tower.save_pretrained(folder)
        size = {"height": SIDE, "width": SIDE}
        SiglipImageProcessor(size=size, image_mean=[0.5] * 3, image_std=[0.5] * 3).save_pretrained(folder)
        save_file(describer.projector.state_dict(), folder / PROJECTOR)
    state.unlink(missing_ok=True)


def _epoch(describer: Describer, optimizer: torch.optim.Optimizer, schedule: object, train: Pictures) -> float:
    describer.train()
    losses = []
    for chosen in torch.randperm(len(train.pixels)).split(BATCH):
        loss = describer.loss(varied(train.pixels[chosen]), train.words[chosen])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(describer.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(float(loss.detach()))
    return sum(losses) / len(losses)


@torch.no_grad()
def rightly(describer: Describer, test: Pictures) -> tuple[float, float]:
    """The shares of patches that are nearest to the right colour, and to the right shape."""
    describer.eval()
    near = torch.cat([describer(some)[1] for some in test.pixels.split(250)])
    right, known = near.argmax(-1) == test.words, test.words != UNKNOWN
    color, shape = (float(right[:, part::2][known[:, part::2]].float().mean()) for part in (0, 1))
    return color, shape


def projector_of(tower: Path) -> Path:
    """The file of its projector."""
    return tower / PROJECTOR
