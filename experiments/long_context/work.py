"""The model and the rows of all questions: a decoder with the proportions of a 7B, and text of any length."""

from pathlib import Path
from typing import Any

import numpy as np

from dhp.data.sample.sample import Sample
from dhp.engine.stage_settings import OptimizerSettings
from experiments.small import save_model

HIDDEN, LAYERS, HEADS, KEY_HEADS = 64, 4, 8, 4
VOCABULARY = 2688  # 42 × HIDDEN, as 152,064 to 3,584
UPDATE = OptimizerSettings(1e-4, (0.9, 0.999), 1e-8, 0.0, "constant", 0, 10**6, None)
INSIDE = 338  # of an MLP, 5.3 × HIDDEN, as 18,944 to 3,584


def make_model(folder: Path, layers: int = LAYERS) -> str:
    """A Qwen2.5-VL with random weights; its tower is as small as one can be."""
    text: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": INSIDE, "num_hidden_layers": layers,
    }  # fmt: skip
    text |= {"num_attention_heads": HEADS, "num_key_value_heads": KEY_HEADS, "max_position_embeddings": 1 << 20}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 1, "fullatt_block_indexes": [0]}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 1, 1]}
    places = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    ids = {name: VOCABULARY - 1 - number for number, name in enumerate(places)}
    return save_model(folder / "model", text, vision, **ids)


def make_row(tokens: int, seed: int = 0) -> Sample:
    """One sample of so many tokens, all of which but the first are to be learned."""
    ids = np.random.default_rng(seed).integers(3, VOCABULARY - 8, tokens)
    return Sample("made", seed, ids, ids.copy(), np.zeros(tokens, dtype=np.int64), (), ())
