"""What OmniBal (Yao et al. 2025, "OmniBal: Towards Fast Instruction-Tuning for Vision-Language Models via Omniverse
Computation Balance") published of its partition: figures alone."""

from __future__ import annotations

from dataclasses import dataclass

BMP_LAYERS = (22, 23, 24, 24)  # of InternViT 6B + InternLM2 20B


@dataclass(frozen=True)
class Columns:
    """Of one method: variances of stages' parameters, layers and forward times, hand-overs beside the first method's
    (MB), days of a GPU."""

    parameters: float
    layers: float
    forward: float
    hand_overs: float
    days: float


COLUMNS = {
    "parameters": Columns(0.03, 13.4, 93.6, 0.0, 42.2),
    "layers": Columns(0.64, 1.2, 20.1, 8.2, 30.6),
    "profile": Columns(0.85, 2.1, 6.5, 16.6, 30.9),
    "bmp": Columns(0.83, 1.5, 12.2, -21.0, 29.0),
}

# GB, by stage of the same model, cut as BMP has it: everything recomputed, then what recompute was left out for.
FREE = (58.2, 56.2, 32.5, 32.7)
FREE_AT_LAST = (12.3, 21.7, 24.7, 30.0)

# By model: layers a stage, and how many of them recompute.
STAGES = {
    "InternViT 6B + Llama3 8B": ((16, 17, 20, 24), (8, 7, 10, 24)),
    "InternViT 6B + InternLM2 20B": (BMP_LAYERS, (0, 0, 0, 0)),
    "InternViT 6B + Yi 34B": ((28, 29, 24, 24), (3, 2, 0, 0)),
    "InternViT 6B + Llama3 70B": ((22, 23, 13, 14, 14, 14, 13, 12), (11, 12, 8, 5, 3, 2, 0, 0)),
    "InternViT 6B + Qwen1.5 110B": ((21, 22, 13, 13, 14, 14, 14, 14), (6, 9, 1, 3, 0, 0, 0, 0)),
    "EVA 1B + InternLM2 20B": ((43, 16, 15, 14), (0, 0, 0, 0)),
    "EVA 4B + InternLM2 20B": ((39, 22, 21, 20), (10, 8, 1, 3)),
    "EVA 8B + InternLM2 20B": ((17, 18, 23, 22), (5, 5, 8, 10)),
    "EVA 18B + InternLM2 20B": ((18, 19, 25, 34), (2, 2, 0, 0)),
}
