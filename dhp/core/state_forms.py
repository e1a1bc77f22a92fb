"""Forms of the states of a trained parameter where a part computes in bfloat16: which pieces there are, and in which
number format.

One table. What a dry run counts, what optimizers allocate, names in checkpoints and what the configuration refuses
follow from it. A form is known by the bytes that a parameter costs in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

BFLOAT16, FLOAT32, FLOAT64, INT16 = "bfloat16", "float32", "float64", "int16"  # as torch names them
FORMAT_BYTES: Mapping[str, int] = MappingProxyType({BFLOAT16: 2, FLOAT32: 4, FLOAT64: 8, INT16: 2})

WEIGHT = "weight"  # what the module computes with
MASTER = "master"  # the optimizer's own copy of a weight, of which the module's is the rounding
COMPENSATION = "compensation"  # what the module's weight lacks of the master weight, whose other half it is
SUM = "sum"  # of gradients, over micro-batches and ranks
MOMENTS = ("exp_avg", "exp_avg_sq")  # AdamW's averages of the gradient and of its square
MOMENTUM = "momentum_buffer"  # Muon's average of a matrix's gradient
# Adafactor's averages of the gradient's square, by row and by column: whole on every rank, whatever is cut.
FACTORS = ("exp_avg_sq_row", "exp_avg_sq_col")
STATE_KINDS = (*MOMENTS, MOMENTUM, *FACTORS)


@dataclass(frozen=True)
class Piece:
    """A number that is kept of each trained parameter. kind: also its name in a checkpoint, as `<parameter>.exp_avg`;
    sums are in none, and the weights have files of their own."""

    kind: str
    format: str

    @property
    def nbytes(self) -> int:
        return FORMAT_BYTES[self.format]


@dataclass(frozen=True)
class StateForm:
    """All pieces of a parameter."""

    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of a parameter where nothing is cut."""
        return sum(piece.nbytes for piece in self.pieces)

    @property
    def equation(self) -> str:
        """`weight(2) + master(4) + sum(4) + exp_avg(4) + exp_avg_sq(4) = 18`."""
        return f"{' + '.join(f'{piece.kind}({piece.nbytes})' for piece in self.pieces)} = {self.nbytes}"

    @property
    def compensated(self) -> bool:
        """Whether the module's weight is half of the master weight, not a copy."""
        return any(piece.kind == COMPENSATION for piece in self.pieces)

    def format(self, kind: str) -> str:
        """The number format of a piece. Raises KeyError where the form has none of the kind."""
        return {piece.kind: piece.format for piece in self.pieces}[kind]


def _form(master: Piece, sums: str, moments: str) -> StateForm:
    return StateForm((Piece(WEIGHT, BFLOAT16), master, Piece(SUM, sums), *(Piece(kind, moments) for kind in MOMENTS)))


_COPY, _HALF = Piece(MASTER, FLOAT32), Piece(COMPENSATION, INT16)
EXACT_STATES = 18  # the form whose update is AdamW's in float32, which every engine holds
FORMS: Mapping[int, StateForm] = MappingProxyType(
    {
        EXACT_STATES: _form(_COPY, FLOAT32, FLOAT32),
        16: _form(_COPY, BFLOAT16, FLOAT32),
        12: _form(_HALF, FLOAT32, BFLOAT16),
        10: _form(_HALF, BFLOAT16, BFLOAT16),
    }
)
