"""Ranks whose norms compute in the format of their states: of sums that two ways of computing make in another order."""

from typing import Any

from tests.helpers.layouts import Fault, InspectedText, InspectedVision
from tests.helpers.norms import use_exact_norms


class ExactVision(InspectedVision):
    def __init__(self, *given: Any):
        use_exact_norms(setattr)
        super().__init__(*given)


class ExactText(InspectedText):
    def __init__(self, *given: Any):
        use_exact_norms(setattr)
        super().__init__(*given)


EXACT = Fault(ExactVision, ExactText)
