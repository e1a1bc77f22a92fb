"""Settings of a part's adapters, sent between processes."""

from __future__ import annotations

from dataclasses import dataclass

from dhp.base.parameters import Selector

NF4 = "nf4"  # four bits a value, the quantiles of a normal distribution (Dettmers et al. 2023, "QLoRA")
ADAPTER = "default"  # peft's own name of the one adapter that a model has here


@dataclass(frozen=True)
class AdapterSettings:
    """Low-rank adapters (Hu et al. 2021, "LoRA") added to the matrices of a part: W + scale × B A.

    rank: rows of A, columns of B. scale: alpha / rank; with rslora alpha / √rank (Kalajdzievski 2023).

    dropout: of what enters A. targets: which matrices; none: all of the layers.

    dora: the norms of W's rows are trained too (Liu et al. 2024).

    quantization: the format of the layers' linear matrices that are not trained, NF4; None: the part's.
    """

    rank: int
    alpha: float
    dropout: float = 0.0
    targets: tuple[str, ...] = ()
    dora: bool = False
    rslora: bool = False
    quantization: str | None = None

    def selectors(self) -> tuple[Selector, ...]:
        """`targets` as selectors over names of weights."""
        return tuple(Selector(said) for said in self.targets)
