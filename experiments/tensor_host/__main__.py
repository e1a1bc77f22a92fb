"""`python -m experiments.tensor_host [--rounds N] [--layers N]`: what a decoder layer costs the host, cut and whole.

Tiny matrices and a fake process group, so that all the time is Python's and the dispatcher's: where it is longer than a
GPU's own, the GPU waits. Rounds of tensor 1, of tensor 2 by transformers' styles on DTensors, and of tensor 2 as dhp
has it are interleaved. A JSON line for each way, medians over rounds, and one with the ratios to tensor 1.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from dhp.models.load import load_part
from dhp.parallel.recompute.recomputed_layers import RecomputedLayers
from dhp.parallel.tensor.slices import use_local_slices
from dhp.parallel.tensor.tensor_plan import local_plan
from dhp.tiny.tiny_model import make_tiny_assets

WAYS = {"tensor 1": (1, False), "tensor 2, library's styles": (2, False), "tensor 2": (2, True)}
TOKENS = 16


def make_steps(model: str, ranks: int, local: bool, recompute: str) -> Callable[[], tuple[float, float]]:
    """What runs the decoder once; seconds of the process in forward and in backward."""
    from torch.distributed.device_mesh import init_device_mesh

    from dhp.models.registry import load_family

    family = load_family(model)
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tensor",)) if ranks > 1 else None
    more = {"read_plan": local_plan} if local else {}
    decoder: nn.Module = load_part(model, family.tower.modules, torch.float32, mesh, **more)
    if local:
        use_local_slices(decoder)
    layers = list(decoder.get_submodule(family.decoder.layers.path))
    RecomputedLayers(layers, family.decoder.layers, (recompute,) * len(layers))
    tokens = torch.full((1, TOKENS), 5)
    positions = torch.zeros(3, 1, TOKENS, dtype=torch.long)

    def step() -> tuple[float, float]:
        begin = time.process_time()
        states = decoder.model(input_ids=tokens, position_ids=positions, use_cache=False).last_hidden_state
        middle = time.process_time()
        states.sum().backward()
        return middle - begin, time.process_time() - middle

    return step


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--layers", type=int, default=12)
    given = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    with tempfile.TemporaryDirectory() as folder:
        model = str(make_deep_model(Path(folder), given.layers))
        for recompute in ("none", "all"):
            _measure(model, recompute, given.rounds, given.layers)


def make_deep_model(folder: Path, layers: int) -> Path:
    """The tiny model with more decoder layers, so that what comes before and after them counts for little."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    make_tiny_assets(folder / "tiny")
    config = AutoConfig.from_pretrained(folder / "tiny" / "model", trust_remote_code=False)
    config.text_config.num_hidden_layers = layers
    config.text_config.layer_types = ["full_attention"] * layers
    config.vision_config.depth = 2
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder / "deep")
    return folder / "deep"


def _measure(model: str, recompute: str, rounds: int, layers: int) -> None:
    steps = {way: make_steps(model, ranks, local, recompute) for way, (ranks, local) in WAYS.items()}
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    for number in range(rounds + 3):
        for way, step in steps.items():
            seconds = step()
            if number >= 3:  # the first rounds fill caches
                found[way].append(seconds)
    medians = {way: [median(run[k] for run in runs) for k in (0, 1)] for way, runs in found.items()}
    base = medians["tensor 1"]
    for way, (forward, backward) in medians.items():
        row = {"recompute": recompute, "way": way}
        row |= {"forward_ms_a_layer": round(forward / layers * 1e3, 3)}
        row |= {"backward_ms_a_layer": round(backward / layers * 1e3, 3)}
        ratio = (forward + backward) / sum(base)
        print(json.dumps(row | {"ratio": round(ratio, 2)}), flush=True)


if __name__ == "__main__":
    main()
