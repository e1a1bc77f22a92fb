"""Trains a small SigLIP to see what easy-VQA asks for, by itself: plain PyTorch, no decoder."""

from __future__ import annotations

import random
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from prepare import answer_of, made_whole, question_of, read_rows
from torch import Tensor, nn
from transformers import SiglipImageProcessor, SiglipVisionConfig, SiglipVisionModel

SIDE, PATCH, WIDTH = 64, 16, 128
BATCH, RATE, SHIFT = 32, 1e-3, 8
CONFIG = SiglipVisionConfig(
    hidden_size=WIDTH, intermediate_size=4 * WIDTH, num_hidden_layers=4, num_attention_heads=4, image_size=SIDE,
    patch_size=PATCH,
)  # fmt: skip


class Reader(nn.Module):
    """The tower, and for each question a linear reading of the 13 answers from a patch's features.

    LLaVA reads the states before the last layer, and so does this. A patch is drawn at random in training, so that each
    one has to carry what the picture shows: a decoder learns to read such features in few steps."""

    def __init__(self, questions: int, answers: int):
        super().__init__()
        self.tower = SiglipVisionModel(CONFIG)
        self.norm = nn.LayerNorm(WIDTH)
        self.readings = nn.Embedding(questions, answers * (WIDTH + 1))
        nn.init.normal_(self.readings.weight, std=WIDTH**-0.5)

    def features(self, pictures: Tensor) -> Tensor:
        """[pictures, patches, width]"""
        return self.norm(self.tower(pictures, output_hidden_states=True).hidden_states[-2])

    def read(self, features: Tensor, questions: Tensor) -> Tensor:
        """Logits [n, answers] of `questions` [n] about `features` [n, width]."""
        weights = self.readings(questions).view(len(questions), -1, WIDTH + 1)
        return torch.einsum("naw,nw->na", weights[..., :-1], features) + weights[..., -1]


class Questions:
    """Those about the pictures of a file, by picture."""

    def __init__(self, folder: Path, name: str, known: list[str], answers: list[str]):
        by_picture: dict[str, list[tuple[int, int]]] = {}
        for one in read_rows(folder / f"{name}.jsonl"):
            pair = (known.index(question_of(one)), answers.index(answer_of(one)))
            by_picture.setdefault(str(one["image"]), []).append(pair)
        pictures = [np.asarray(Image.open(folder / path).convert("RGB")) for path in by_picture]
        self.pictures = torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2) / 127.5 - 1.0
        self.asked = list(by_picture.values())

    def take(self, chosen: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Of the pictures chosen, all questions: which of them each is about, the question, the answer."""
        found = [(place, *pair) for place, number in enumerate(chosen) for pair in self.asked[number]]
        return torch.tensor(found).unbind(1)


def varied(pictures: Tensor) -> Tensor:
    """Each mirrored and moved at random. Colours and names of shapes stay right."""
    shifts = (random.randint(-SHIFT, SHIFT), random.randint(-SHIFT, SHIFT))
    pictures = pictures.roll(shifts, (-2, -1))
    axes = [axis for axis in (-2, -1) if random.random() < 0.5]
    return pictures.flip(axes) if axes else pictures


def train_tower(out: Path, data: Path, epochs: int, seed: int) -> float:
    """Write the tower; the share of test questions that its readings answer rightly. Goes on where it was stopped."""
    random.seed(seed)
    torch.manual_seed(seed)
    known = sorted({question_of(one) for name in ("train", "test") for one in read_rows(data / f"{name}.jsonl")})
    answers = sorted({answer_of(one) for one in read_rows(data / "train.jsonl")})
    train, test = (Questions(data, name, known, answers) for name in ("train", "test"))
    reader = Reader(len(known), len(answers))
    optimizer = torch.optim.AdamW(reader.parameters(), lr=RATE, weight_decay=0.05)
    steps = epochs * -(-len(train.asked) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, steps, pct_start=0.1)
    state, begun = out.with_name(f"{out.name}.state.pt"), 0
    if state.exists():
        held = torch.load(state, weights_only=True)
        for part, name in ((reader, "reader"), (optimizer, "optimizer"), (schedule, "schedule")):
            part.load_state_dict(held[name])
        begun = held["epochs"]
        print(f"the tower goes on after epoch {begun}", flush=True)
    for epoch in range(begun, epochs):
        started = time.perf_counter()
        random.seed(seed + epoch)
        torch.manual_seed(seed + epoch)
        loss = _epoch(reader, optimizer, schedule, train)
        right = rightly(reader, test)
        seconds = time.perf_counter() - started
        print(f"tower, epoch {epoch + 1}/{epochs}  loss {loss:.3f}  test {right:.1%}  {seconds:.1f} s", flush=True)
        parts = {"reader": reader, "optimizer": optimizer, "schedule": schedule}
        partial = state.with_suffix(".partial")
        torch.save({name: part.state_dict() for name, part in parts.items()} | {"epochs": epoch + 1}, partial)
        partial.replace(state)
    with made_whole(out) as folder:
        reader.tower.save_pretrained(folder)
        size = {"height": SIDE, "width": SIDE}
        SiglipImageProcessor(size=size, image_mean=[0.5] * 3, image_std=[0.5] * 3).save_pretrained(folder)
    right = rightly(reader, test)
    state.unlink(missing_ok=True)
    return right


def _epoch(reader: Reader, optimizer: torch.optim.Optimizer, schedule: object, train: Questions) -> float:
    reader.train()
    order = random.sample(range(len(train.asked)), len(train.asked))
    losses = []
    for first in range(0, len(order), BATCH):
        chosen = order[first : first + BATCH]
        about, questions, answers = train.take(chosen)
        features = reader.features(varied(train.pictures[chosen]))
        patches = torch.randint(features.shape[1], (len(about),))
        loss = F.cross_entropy(reader.read(features[about, patches], questions), answers)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(reader.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(float(loss.detach()))
    return sum(losses) / len(losses)


@torch.no_grad()
def rightly(reader: Reader, test: Questions) -> float:
    """The share of questions that one patch, drawn at random, answers rightly."""
    reader.eval()
    right = []
    for first in range(0, len(test.asked), 250):
        chosen = list(range(first, min(first + 250, len(test.asked))))
        about, questions, answers = test.take(chosen)
        features = reader.features(test.pictures[chosen])
        patches = torch.randint(features.shape[1], (len(about),))
        right.append(reader.read(features[about, patches], questions).argmax(1) == answers)
    return float(torch.cat(right).float().mean())
