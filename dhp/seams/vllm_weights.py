"""vLLM's `WeightSource` over a run's weights, for its transfer engines; written beside vLLM 0.33.0.

Importing this file imports vLLM, 0.28 or newer."""

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from itertools import zip_longest

import torch
from torch import Tensor

from dhp.core.errors import ConfigError, ModelError

try:
    from vllm.distributed.weight_transfer import ParamMeta, WeightSource
except ImportError as error:
    raise ConfigError(
        f"weights for vLLM need vLLM 0.28 or newer, whose WeightSource cannot be imported ({error}). Install it beside "
        "dhp: docs/developers/seams.md#installing-them"
    ) from error


class RunWeights(WeightSource):  # type: ignore[misc]  # its library has no types
    """The weights of a run for any engine of vLLM's that sends whole tensors (NCCL, IPC, RDT), as the trainer of rank 0
    that owns all of them. `iter_local` is not there: engines that send pieces refuse such a source.

    >>> with dhp.Run(config) as run:
    ...     engine = WeightTransferTrainerFactory.trainer_init(info, client=client, source=RunWeights(run.weights))
    ...     engine.send_weights()  # after each step

    weights: begins a pass over keys of an export's files and tensors, as `dhp.Run.weights` does. device: where vLLM
    takes them; None: where they are."""

    def __init__(self, weights: Callable[[], Iterable[tuple[str, Tensor]]], device: torch.device | None = None) -> None:
        self._weights, self._device = weights, device

    @cached_property
    def metadata(self) -> list[ParamMeta]:
        """Key, number format and shape of each, by a pass before the first that sends anything."""
        return [_describe(name, tensor) for name, tensor in self._weights()]

    def iter_full(self) -> Iterator[tuple[str, Tensor]]:
        """A pass, in the order of `metadata`. Raises ModelError where it is not what was declared: those who receive go
        by that, and would read other weights."""
        for declared, pair in zip_longest(self.metadata, self._weights()):
            sent = None if pair is None else _describe(*pair)
            if sent != declared:
                raise ModelError(
                    f"a pass over the run's weights has {_words(sent)} where {_words(declared)} was declared. Make the "
                    "source anew, and vLLM's engine with it, whenever weights change their keys, formats or shapes"
                )
            name, tensor = pair
            yield name, tensor if self._device is None else tensor.to(self._device)


def _describe(name: str, tensor: Tensor) -> ParamMeta:
    return ParamMeta(name, tensor.dtype, tuple(tensor.shape))


def _words(meta: ParamMeta | None) -> str:
    return "nothing" if meta is None else f"{meta.name} ({meta.dtype}, {list(meta.shape)})"
