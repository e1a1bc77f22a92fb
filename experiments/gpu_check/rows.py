"""The sections and their rows: what each is called, and the function that finds it.

Modules are imported where a row runs, so that one that cannot be imported costs its own rows alone. Sections stand in
the order of what their answers are worth."""

from dataclasses import dataclass
from typing import Any

HERE = "experiments.gpu_check"
SHARED, MAPPED = "shared_memory", "cuda_ipc"


@dataclass(frozen=True)
class Row:
    """`function` of `module`, called with the setting and these arguments, answers with fields, "ok" among them.

    fresh: in a process that ran no other row before."""

    name: str
    module: str
    function: str = "check"
    arguments: tuple[Any, ...] = ()
    fresh: bool = False


@dataclass(frozen=True)
class Section:
    """limit_s: seconds for all of its rows on a GPU."""

    name: str
    limit_s: float
    rows: tuple[Row, ...]


def _row(name: str, place: str, *arguments: Any, fresh: bool = False) -> Row:
    module, _, function = place.partition(".")
    return Row(name, f"{HERE}.{module}", function or "check", arguments, fresh)


def _depth(samples: int, recompute: str) -> Row:
    return _row(f"{samples} samples, recompute {recompute}", "full_depth", samples, recompute)


def _compiled(samples: int) -> Row:
    """In a process of its own: what a compiler made holds the weights that it was made for."""
    return _row(f"{samples} samples, recompute none, compiled", "full_depth", samples, "none", True, fresh=True)


def _beside(samples: int, recompute: str) -> Row:
    name = f"{samples} samples, recompute {recompute}, beside plain"
    return _row(name, "full_depth.check_beside_plain", samples, recompute)


# What `experiments.gpu_check.parity.Layout` has of each; degrees as keywords.
LAYOUTS: dict[str, dict[str, Any]] = {
    "1+1": {}, "2+2": {"vision": {"ulysses": 2}, "text": {"tensor": 2}}, "text ring 2": {"text": {"ring": 2}},
    "FSDP2 data 2": {"vision": {"data": 2}, "text": {"data": 2}, "zero_stage": 3}, "pipeline 2": {"pipeline": 2},
    "LoRA": {"lora": 4}, "QLoRA": {"lora": 4, "quantization": "nf4", "recompute": "none"},
    "experts": {"family": "qwen3_vl_moe"}, "experts, all visited": {"family": "qwen3_vl_moe, all experts"},
    "deepstack": {"family": "qwen3_vl"}, "generic": {"family": "gemma3"},
    "DeepSpeed ZeRO-1": {"zero_stage": 1, "engine": "deepspeed"},
}  # fmt: skip
PARITY = (
    ("1+1", "bfloat16"), ("2+2", "bfloat16"), ("1+1", "float32"), ("2+2", "float32"), ("text ring 2", "bfloat16"),
    ("FSDP2 data 2", "bfloat16"), ("pipeline 2", "bfloat16"), ("LoRA", "bfloat16"), ("QLoRA", "bfloat16"),
    ("experts, all visited", "bfloat16"), ("experts", "float32"), ("deepstack", "bfloat16"), ("generic", "bfloat16"),
    ("DeepSpeed ZeRO-1", "bfloat16"),
)  # fmt: skip
IN_ONE_PROCESS = ("1+1", "LoRA", "QLoRA", "experts", "deepstack", "generic")
KINDS = ("none", "light", "mlp", "linear", "all", "offload")

SECTIONS = (
    Section("probe", 40.0, (_row("machine", "probe.check_machine"), _row("registry", "probe.check_registry"))),
    Section("kernels", 50.0, (
        _row("gate in a fresh process", "kernels.check_gate", fresh=True),
        _row("varlen, head dim 80", "kernels.check_varlen", 80, False),
        _row("varlen, head dim 128, grouped, causal", "kernels.check_varlen", 128, True),
        _row("block, head dim 80", "kernels.check_block", 80, False),
        _row("block, head dim 128, grouped", "kernels.check_block", 128, False),
        _row("block, head dim 128, grouped, causal", "kernels.check_block", 128, True),
        _row("patch embedding", "kernels.check_patches"), _row("RMS norm", "kernels.check_norm"),
        _row("rotary positions of the tower", "kernels.check_rotary"), _row("SDPA by length", "kernels.check_sdpa"),
    )),
    # What has the room for sure comes first: after what has not, the model is made anew.
    Section("full_depth", 130.0, (
        _depth(4, "full"), _row("states", "full_depth.check_states"), _depth(1, "light"), _depth(1, "full"),
        _depth(8, "full"), _beside(4, "full"), _beside(1, "none"), _depth(4, "mlp"), _compiled(1), _depth(4, "none"),
        _depth(8, "mlp"), _depth(8, "light"), _depth(8, "none"), _compiled(4),
    )),
    Section("profile", 50.0, (_row("4 samples, recompute full", "full_depth.check_profile", 4, "full"),)),
    Section("processes", 70.0, (
        _row("hand-over by shared memory", "processes.check_hand_over", SHARED),
        _row("hand-over by CUDA IPC", "processes.check_hand_over", MAPPED),
        _row("steps by shared memory", "processes.check_steps", SHARED, 8),
        _row("steps by CUDA IPC", "processes.check_steps", MAPPED, 8),
    )),
    Section("parity", 90.0, tuple(_row(f"{name} {kind}", "parity", name, kind) for name, kind in PARITY)),
    Section("recompute", 40.0, (
        _row("planner", "full_depth.check_plan", 8),
        *(_row(f"8 samples, {kind}", "full_depth.check_kind", 8, kind) for kind in KINDS),
    )),
    Section("generation", 20.0, (_row("64 new tokens", "full_depth.check_answer", 64),)),
    Section("waits", 20.0, tuple(_row(name, "waits", name) for name in IN_ONE_PROCESS)),
    Section("determinism", 30.0, (
        _row("as it is", "full_depth.check_bits", False),
        _row("training.deterministic", "full_depth.check_bits", True, fresh=True),
    )),
)  # fmt: skip
UNANSWERED = (
    "NCCL over more than one GPU: whether it starts, how fast it is, what a rank that fails leaves",
    "bandwidths of tensor and sequence parallelism over NVLink or a network",
    "overlap of gradient sums with backward over several GPUs",
    "Ray: placement, object store, actors that die",
    "several hosts",
)
