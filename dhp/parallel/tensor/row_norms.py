"""DoRA (Liu et al. 2024) of matrices that ranks may hold slices of."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from dhp.core.parameters import ADAPTER
from dhp.parallel.comm import sum_in_place
from dhp.parallel.tensor.slices import cut_of, take_slice
from dhp.parallel.tensor.styles import COLUMNS, PARTIAL_OVER, ROWS, HeadRows, exit_of, sum_of_ranks


class ScaledRows:
    """In the place of peft's DoRA of one layer, the same arithmetic: each row of W + scaling · B·A is scaled to a
    trained norm, and the norm that it has is a constant to backward. Ranks that hold slices of rows add up squares."""

    def __init__(self, layer: Any, group: dist.ProcessGroup | None):
        """group: of the tensor ranks; None: nothing is summed."""
        base, cut = layer.base_layer, cut_of(layer.base_layer, "weight")
        self._rows: HeadRows | None = base.__dict__.get(ROWS)
        self._columns: slice | None = base.__dict__.get(COLUMNS)
        by_inputs = cut is not None and not cut.placements[0].is_replicate() and cut.placements[0].dim == 1
        self._squares_over = group if by_inputs else None
        self._parts_over = group if by_inputs or self._columns is not None else None
        self._drops = not isinstance([*layer.lora_dropout[ADAPTER].modules()][-1], nn.Identity)

    def forward(self, module: Any, active_adapter: str, x: Tensor, result: Tensor, **_: Any) -> Tensor:
        """The layer's output. x: its input; result: what its matrix makes of that, with the bias."""
        base, norms = module.base_layer, module.lora_magnitude_vector[active_adapter].weight
        states = module.lora_dropout[active_adapter](x)
        if self._drops and module.training:
            product = self._product(base, states)
        else:
            product = result if base.bias is None else result - self._of_rank(base.bias)
        added = module.lora_B[active_adapter](module.lora_A[active_adapter](states))
        scale = self._of_rank(norms / self.norms(module, adapted=True))
        more, scale = (scale - 1).to(result.dtype), (scale * module.scaling[active_adapter]).to(result.dtype)
        return result + more * product + scale * added

    @torch.no_grad()
    def norms(self, layer: Any, adapted: bool) -> Tensor:
        """Of the rows that this rank holds, whole, in float32 (float64 of float64). adapted: with the adapter."""
        weight = layer.base_layer.weight
        if adapted:
            into, out = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
            weight = torch.addmm(weight, out, into, alpha=layer.scaling[ADAPTER])
        norms = torch.linalg.vector_norm(weight, dim=1, dtype=torch.promote_types(weight.dtype, torch.float32))
        return norms if self._squares_over is None else sum_in_place(norms.square_(), self._squares_over).sqrt_()

    def _of_rank(self, values: Tensor) -> Tensor:
        """Of each column of the layer's output."""
        return values if self._rows is None else self._rows.repeated(values[self._rows.rows])

    def _product(self, base: Any, states: Tensor) -> Tensor:
        """What the matrix makes of states of which some are dropped, without the bias."""
        if self._rows is not None:
            return self._rows.product(states, base.weight, None)
        make, weight = exit_of(base), base.weight if self._columns is None else base.weight[:, self._columns]
        part = F.linear(states, weight)
        if make is not None:
            return make(part)
        return part if self._parts_over is None else sum_of_ranks(part, self._parts_over)


def scale_rows(layers: Iterator[tuple[str, Any]], group: dist.ProcessGroup | None, begun: bool = False) -> None:
    """Let adapters with norms, which are cut already (`dhp.parallel.tensor.slices.cut_adapters`), compute with those,
    cut as the rows of their second matrix are. begun: norms have values, as those of a directory."""
    for _, layer in layers:
        if ADAPTER not in layer.lora_magnitude_vector:
            continue
        norms, out, variant = layer.lora_magnitude_vector[ADAPTER], layer.lora_B[ADAPTER], ScaledRows(layer, group)
        cut, partial = cut_of(out, "weight"), out.__dict__.get(PARTIAL_OVER)
        if cut is not None:
            take_slice(norms, cut.mesh, cut.placements[0])
        if partial is not None:
            setattr(norms, PARTIAL_OVER, partial)
        layer.lora_variant[ADAPTER] = variant
        if not (begun or norms.weight.is_meta):
            norms.weight.detach().copy_(variant.norms(layer, adapted=False))
