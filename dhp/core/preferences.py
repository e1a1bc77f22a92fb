"""What a sample is of a preference."""

import math
from typing import NamedTuple

PAIRS, SINGLES = "pairs", "answers"  # what is compared: two answers to a question, or one with how it is liked
CHOSEN, REJECTED, OTHER = 1, -1, 0  # sides of a preference; OTHER: an answer to another prompt, which none learns


class Mark(NamedTuple):
    """What a sample is of a preference: samples of a row are two by two, the two sides of one.

    side: CHOSEN and then REJECTED; or either of both alone, and then OTHER. first: of the two. reference: the answer's
    log-probability by the model that it is compared with; NaN: not known."""

    side: int
    reference: float = math.nan
    first: bool = True
