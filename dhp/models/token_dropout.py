"""Dropout of what enters an adapter, by token and column: the same in every layout, and the same again."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dhp.core.draws import TokenKeys, column_bits, current_keys, draw_dropped, draw_key
from dhp.core.errors import ConfigError


class TokenDropout(nn.Module):
    """As torch's dropout (Srivastava et al. 2014, section 4): in training each element is 0 with a chance of `share`,
    and the others are divided by 1 - share.

    What it drops follows from the tokens' keys (`dhp.core.draws.drawing`), the name of the module that it stands
    before, and the column. first_column: of the states given here, in those of the whole module.
    """

    def __init__(self, share: float, name: str):
        super().__init__()
        self.share, self.first_column = share, 0
        self._name, self._module = name, draw_key(name)
        self._columns: Tensor | None = None

    def extra_repr(self) -> str:
        return f"share={self.share}"

    def forward(self, states: Tensor) -> Tensor:
        """[…, columns] → as many. Raises RuntimeError where nobody has said which tokens are computed, ConfigError
        where the states are not of those."""
        if not self.training:
            return states
        return states.masked_fill(self._dropped(states), 0.0).mul_(1 / (1 - self.share))

    def _dropped(self, states: Tensor) -> Tensor:
        keys = current_keys()
        if states.is_meta:  # what it keeps is counted, and has no values
            if keys is not None:
                self._rows(states, keys)
            return torch.empty(states.shape, dtype=torch.bool, device=states.device)
        if keys is None:
            raise RuntimeError(
                "an adapter with dropout was called for tokens of which nothing is known. Call its model inside of "
                "dhp.core.draws.drawing, or dhp.models.lora.without_dropout"
            )
        width = states.shape[-1]
        if self._columns is None or len(self._columns) != width or self._columns.device != states.device:
            self._columns = column_bits(self.first_column, width, states.device)
        rows = self._rows(states, keys)
        return draw_dropped(rows, self._module, self._columns, self.share).view(states.shape)

    def _rows(self, states: Tensor, keys: TokenKeys) -> Tensor:
        count = states.shape[:-1].numel()
        rows = keys.of_rows(count)
        if rows is None:
            raise ConfigError(
                f"lora.dropout={self.share} of {self._name}: it is given {count} rows where the part has "
                f"{keys.said()}. Which token a row is of is not known, "
                "so another layout would leave out others. Leave the module out of lora.targets, or set lora.dropout=0"
            )
        return rows
