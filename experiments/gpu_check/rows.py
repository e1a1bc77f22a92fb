"""The sections and their rows: what each is called, and the function that finds it.

Modules are imported where a row runs, so that one that cannot be imported costs its own rows alone. Sections stand in
the order of what their answers are worth."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

HERE = "experiments.gpu_check"
NONE: Mapping[str, Any] = {}
SHARED, MAPPED = "shared_memory", "cuda_ipc"


@dataclass(frozen=True)
class Row:
    """`function` of `module`, called with the setting, arguments and keywords, answers with fields, "ok" among them.

    fresh: in a process that ran no other row before."""

    name: str
    module: str
    function: str = "check"
    arguments: tuple[Any, ...] = ()
    fresh: bool = False
    keywords: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Section:
    """limit_s: seconds for all of its rows on a GPU."""

    name: str
    limit_s: float
    rows: tuple[Row, ...]


def _row(name: str, place: str, *arguments: Any, fresh: bool = False, keywords: Mapping[str, Any] = NONE) -> Row:
    module, _, function = place.partition(".")
    return Row(name, f"{HERE}.{module}", function or "check", arguments, fresh, keywords)


def _depth(samples: int, recompute: str, needs_gb: int, **changes: Any) -> Row:
    """needs_gb: of the device, as a step took or as it was counted."""
    told = "".join(f", {key} {value}" for key, value in changes.items())
    name = f"{samples} samples, recompute {recompute}{told}"
    return _row(name, "full_depth", samples, recompute, needs_gb, keywords=changes)


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
ATTENTION = ("torch", "FA4", "FA3", "flash_attention_2", "cuDNN")
KINDS = ("none", "light", "mlp", "linear", "all", "offload")

SECTIONS = (
    Section("probe", 45.0, (_row("machine", "probe.check_machine"), _row("registry", "probe.check_registry"))),
    Section("product", 265.0, (
        _row("tiny 2+2, killed", "product.check_tiny", "2+2"), _row("tiny 1+1", "product.check_tiny", "1+1"),
        _row("tiny resumed as 1+1", "product.check_resumed"), _row("3B by Ray", "product.check_by_ray"),
        _row("3B, both engines in one process", "product.check_engines"),
        _row("3B, plain transformers", "product.check_plain", fresh=True),
        _row("3B, recompute=auto", "product.check_budget"),
    )),
    Section("rates", 25.0, tuple(
        _row(name, f"rates.check_{name}") for name in ("launches", "copies", "products")
    )),
    Section("attention", 35.0, tuple(_row(f"by {name}", "rates.check_attention", name) for name in ATTENTION)),
    Section("processes", 40.0, (
        _row("hand-over by shared memory", "processes.check_hand_over", SHARED),
        _row("hand-over by CUDA IPC", "processes.check_hand_over", MAPPED),
    )),
    # What has the room for sure comes first; each other form of the states is a model that is made anew.
    Section("full_depth", 95.0, (
        _depth(4, "full", 72), _row("states", "full_depth.check_states"), _depth(8, "full", 76), _depth(4, "mlp", 82),
        _depth(8, "mlp", 97), _depth(4, "light", 102), _depth(8, "light", 135), _depth(4, "none", 122),
        _depth(4, "offload", 72), _depth(4, "light", 66, state_bytes=10), _depth(8, "mlp", 63, state_bytes=10),
        _depth(4, "full", 72, kernels="mlp:plain"),
    )),
    Section("compile", 40.0, (_row("varied data", "full_depth.check_graphs"),)),
    Section("parity", 65.0, tuple(_row(f"{name} {kind}", "parity", name, kind) for name, kind in PARITY)),
    Section("generation", 20.0, (_row("64 new tokens", "full_depth.check_answer", 64),)),
    Section("determinism", 25.0, (
        _row("as it is", "full_depth.check_bits", False),
        _row("training.deterministic", "full_depth.check_bits", True, fresh=True),
    )),
    Section("kernels", 30.0, (
        _row("gate in a fresh process", "kernels.check_gate", fresh=True),
        _row("varlen, head dim 80", "kernels.check_varlen", 80, False),
        _row("varlen, head dim 128, grouped, causal", "kernels.check_varlen", 128, True),
        _row("block, head dim 80", "kernels.check_block", 80, False),
        _row("block, head dim 128, grouped", "kernels.check_block", 128, False),
        _row("block, head dim 128, grouped, causal", "kernels.check_block", 128, True),
        _row("patch embedding", "kernels.check_patches"), _row("RMS norm", "kernels.check_norm"),
        _row("rotary positions of the tower", "kernels.check_rotary"),
    )),
    Section("waits", 15.0, tuple(_row(name, "waits", name) for name in IN_ONE_PROCESS)),
    Section("profile", 15.0, (_row("4 samples, recompute full", "full_depth.check_profile", 4, "full"),)),
    Section("recompute", 15.0, (
        _row("planner", "full_depth.check_plan", 8),
        *(_row(f"8 samples, {kind}", "full_depth.check_kind", 8, kind) for kind in KINDS),
    )),
)  # fmt: skip
# The two calls that the script's header shows: seconds, and what they have time for.
CALLS = ((420, SECTIONS[:5]), (330, SECTIONS[5:]))
UNANSWERED = (
    "NCCL over more than one GPU: whether it starts, how fast it is, what a rank that fails leaves",
    "bandwidths of tensor and sequence parallelism over NVLink or a network",
    "overlap of gradient sums with backward over several GPUs",
    "Ray over several hosts, and actors of it that die there",
)
