"""How many rows of a head's logits exist at a time."""

from __future__ import annotations

CHUNK_ROWS = 2048
