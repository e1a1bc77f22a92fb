"""Layouts of runs on null CUDA."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.runs import ONE_ACTOR_EACH
from tests.nullcuda.models import experts, hearing

BFLOAT16 = ("vision.dtype=bfloat16", "text.dtype=bfloat16")
APART = "cluster.collocate=false"
PARTS = ("vision", "text")
NCCL, GLOO = "nccl", "gloo"
MEMORY, IPC, STORE = "shared_memory", "cuda_ipc", "object_store"
Model = Callable[[Path], tuple[str, ...]]  # makes a model in a folder: the settings of a run of it


@dataclass(frozen=True)
class Layout:
    """gpus: of each node. settings: of the run. backend, transport: those that follow. model: None, the tiny one.

    waits: of the host in micro-batches, beside the hand-over's, by where they are; `step_counts` says of which."""

    gpus: int
    settings: tuple[str, ...]
    backend: str = NCCL
    transport: str = NCCL
    model: Model | None = None
    nodes: int = 1
    waits: tuple[str, ...] = ()


def both(*said: str) -> tuple[str, ...]:
    return tuple(f"{part}.{one}" for part in PARTS for one in said)


BOUND = ("parallel/device.py:wait",)  # so that copies to the host do not pile up
ONE = (*BFLOAT16, *ONE_ACTOR_EACH)
LAYOUTS: dict[str, Layout] = {
    "1+1 on one GPU": Layout(1, ONE, transport=IPC),
    "1+1 through host memory": Layout(1, (*ONE, f"cluster.transport={MEMORY}"), transport=MEMORY),
    "2+2": Layout(2, BFLOAT16),
    "2+2 on one GPU": Layout(1, BFLOAT16, GLOO, IPC, waits=("parallel/comm.py", "outside of dhp")),  # gloo's own copies
    "float32": Layout(2, ()),
    "FSDP2, stage 3, offload": Layout(
        2,
        (*BFLOAT16, "text.parallelism=data", "text.zero_stage=3", "text.zero_engine=fsdp", *both("recompute=offload")),
        waits=BOUND,
    ),
    "ring": Layout(2, (*BFLOAT16, *both("parallelism=sequence", "ring=2"))),
    "ring 2 x ulysses 2": Layout(
        4, (*BFLOAT16, *both("num_actors=4", "parallelism=sequence", "ring=2", "ulysses=2", "zero_stage=0"))
    ),
    "pipeline apart": Layout(
        3, (*BFLOAT16, "vision.parallelism=none", "vision.num_actors=1", "vision.zero_stage=0",
            "text.parallelism=pipeline", APART)
    ),
    "chain": Layout(
        3, (*BFLOAT16, "cluster.chain=true", "training.schedule=1f1b", "vision.num_actors=2",
            "vision.parallelism=pipeline", "vision.zero_stage=0", "text.num_actors=2", "text.parallelism=pipeline")
    ),
    "apart on 4, through host memory": Layout(4, (*BFLOAT16, APART, f"cluster.transport={MEMORY}"), transport=MEMORY),
    "apart on 8": Layout(
        8, (*BFLOAT16, APART, "vision.num_actors=4", "text.num_actors=4", "text.parallelism=tensor", "text.data=2")
    ),
    "experts": Layout(
        2, (*BFLOAT16, "vision.parallelism=none", "vision.num_actors=1", "vision.zero_stage=0",
            "text.parallelism=data", "text.num_actors=2", "text.expert=2"), model=experts,
        waits=("parallel/expert/expert_shares.py",),
    ),
    "audio, vision and text": Layout(2, (*BFLOAT16, "audio.dtype=bfloat16"), model=hearing),
    "recompute=auto, deterministic": Layout(
        1, (*ONE, *both("recompute=auto"), "training.deterministic=true"), transport=IPC
    ),
    **{f"{size} bytes": Layout(1, (*ONE, *both(f"state_bytes={size}")), transport=IPC) for size in (10, 12, 16)},
    "moments on the host": Layout(1, (*ONE, "text.host_moments=true", "text.state_bytes=12"), transport=IPC),
    "adapters": Layout(1, (*ONE, "text.lora.rank=8", "training.frozen=[vision]"), transport=IPC),
    "offload": Layout(1, (*ONE, *both("recompute=offload")), transport=IPC, waits=BOUND),
    "two nodes, object store": Layout(
        2, (*BFLOAT16, APART, f"cluster.transport={STORE}"), transport=STORE, nodes=2
    ),
    "three nodes": Layout(
        1, (*BFLOAT16, "vision.parallelism=none", "vision.num_actors=1", "vision.zero_stage=0", APART,
            "text.parallelism=pipeline"), nodes=3
    ),
}  # fmt: skip
