"""What each kernel would cost: bytes that it has to read and write, operations, and which kind of work it is.

Bytes are those of distinct elements: what a dimension of stride 0 repeats is read once. What an operation only writes
is not read; what an index chooses is read and written by rows, not whole. Views cost nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from experiments.fake_cuda.watch import Watch

PRODUCT, ATTENTION, ELEMENTWISE, COLLECTIVE = "product", "attention", "elementwise", "collective"
KINDS = (PRODUCT, ATTENTION, ELEMENTWISE, COLLECTIVE)
_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward", "_grouped_mm"}
# Nothing runs for these, and their schemas do not say so.
_FREE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_FREE |= {"_unsafe_view", "lift_fresh", "device"}
_WRITES_ONLY = {"copy_", "fill_", "zero_"}  # in place, without reading what was there
# Of these an index chooses rows of the first argument: what is chosen is as large as the result, or as the source.
_CHOSEN = {"index_select", "gather", "embedding", "index"}
_INTO_ZEROS = {"select_backward", "slice_backward"}  # all of it zero, then the gradient into a part of it
_SCATTERED = {"scatter_add_": 3, "index_put_": 2, "index_add_": 3, "scatter_": 3, "index_copy_": 3}


@dataclass
class Cost:
    """Sums over kernels."""

    kernels: int = 0
    nbytes: int = 0
    flops: int = 0

    def add(self, nbytes: int, flops: int) -> None:
        """One more kernel."""
        self.kernels, self.nbytes, self.flops = self.kernels + 1, self.nbytes + nbytes, self.flops + flops


@dataclass(frozen=True)
class Kernel:
    """One launch. name: of the operation, or of a fused function; vocabulary: an operand has a dimension of the
    vocabulary, so that it belongs to the embedding, the head or the loss."""

    phase: str
    name: str
    kind: str
    nbytes: int
    flops: int
    vocabulary: bool = False
    assumed: bool = False


class Costs(Watch):
    """A watch that keeps every kernel. vocabulary: the number of tokens that the model knows; 0: told apart nowhere."""

    def __init__(self, vocabulary: int = 0) -> None:
        super().__init__()
        self._vocabulary = vocabulary
        self.launched: list[Kernel] = []

    def ran(self, func: Any, args: Any, kwargs: Mapping[str, Any], result: Any) -> None:
        super().ran(func, args, kwargs, result)
        name = func._schema.name.split("::")[-1]
        if name in _FREE or _is_view(func._schema):
            return
        read, written = _moved(func._schema, name, args, kwargs, result)
        kind = _kind(func._schema.name, name)
        self._keep(name, kind, [*read, *written], _flops(func, name, args, kwargs, result))

    def book(self, name: str, read: Iterable[Tensor], written: Iterable[Tensor]) -> None:
        """A fused kernel that reads and writes these once."""
        self._keep(name, ELEMENTWISE, [(tensor, size_of(tensor)) for tensor in (*read, *written)], 0)

    def save(self, name: str, tensors: Iterable[Tensor]) -> None:
        """What a compiler is assumed to spare: these are not moved once more. A kernel of negative bytes."""
        nbytes = -sum(map(size_of, tensors))
        self.launched.append(Kernel(self.phase, name, ELEMENTWISE, nbytes, 0, assumed=True))

    def _keep(self, name: str, kind: str, moved: list[tuple[Tensor, int]], flops: int) -> None:
        there = [(tensor, nbytes) for tensor, nbytes in moved if tensor.device.type == "cuda"]
        nbytes = sum(nbytes for _, nbytes in there)
        of_all = name.startswith(("_foreach", "_fused"))  # parameters in one kernel
        words = self._vocabulary > 0 and not of_all and any(self._vocabulary in tensor.shape for tensor, _ in there)
        self.launched.append(Kernel(self.phase, name, kind, nbytes, flops, words))


def size_of(tensor: Tensor) -> int:
    """Bytes of its distinct elements."""
    count = tensor.element_size()
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride or size == 0 else 1
    return count


def sums(kernels: Collection[Kernel]) -> dict[tuple[str, str, bool, bool], Cost]:
    """By phase, kind, whether of the vocabulary, and whether assumed."""
    found: dict[tuple[str, str, bool, bool], Cost] = defaultdict(Cost)
    for one in kernels:
        found[one.phase, one.kind, one.vocabulary, one.assumed].add(one.nbytes, one.flops)
    return dict(found)


def _is_view(schema: Any) -> bool:
    return any(of.alias_info is not None and not of.alias_info.is_write for of in schema.returns)


def _kind(qualified: str, name: str) -> str:
    if name in _PRODUCTS:
        return PRODUCT
    if "attention" in name or "attn" in name:
        return ATTENTION
    return COLLECTIVE if qualified.startswith(("c10d", "_c10d")) else ELEMENTWISE


def _moved(schema: Any, name: str, args: Any, kwargs: Mapping[str, Any], result: Any) -> tuple[list[Any], list[Any]]:
    """Tensors with the bytes of them that are read, and that are written."""
    if name in _CHOSEN:
        outputs = [value for value in tree_leaves(result) if isinstance(value, Tensor)]
        indices = [value for value in tree_leaves((args[1:], kwargs)) if isinstance(value, Tensor)]
        return [(args[0], sum(map(size_of, outputs)))] + _sized(indices), _sized(outputs)
    if name in _SCATTERED:
        given = [value for value in tree_leaves((args[1:], kwargs)) if isinstance(value, Tensor)]
        source = args[_SCATTERED[name]]
        chosen = size_of(source) if isinstance(source, Tensor) else 0
        return [(args[0], chosen)] + _sized(given), [(args[0], chosen)]
    read: list[Tensor] = []
    written: list[Tensor] = [args[0]] if name in _INTO_ZEROS else []
    shape_alone = name.startswith("new_") or name.endswith("_like")  # is asked of the argument
    for number, argument in enumerate(schema.arguments):
        value = args[number] if number < len(args) else kwargs.get(argument.name)
        tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
        writes = argument.alias_info is not None and argument.alias_info.is_write
        written += tensors if writes else []
        unread = argument.is_out or shape_alone or (writes and name in _WRITES_ONLY)
        read += [] if unread else tensors
    if not any(of.alias_info is not None for of in schema.returns):
        written += [value for value in tree_leaves(result) if isinstance(value, Tensor)]
    return _sized(read), _sized(written)


def _sized(tensors: Iterable[Tensor]) -> list[tuple[Tensor, int]]:
    return [(tensor, size_of(tensor)) for tensor in tensors]


def _flops(func: Any, name: str, args: Any, kwargs: Mapping[str, Any], result: Any) -> int:
    """Multiplications and additions of products and of attention; 0 of all else."""
    if name.startswith("_varlen_attn"):
        return _varlen_flops(name, func._schema, args, kwargs)
    count = flop_registry.get(func._overloadpacket)
    return 0 if count is None else int(count(*args, **kwargs, out_val=result))


def _varlen_flops(name: str, schema: Any, args: Any, kwargs: Mapping[str, Any]) -> int:
    """Of segments one behind another. Their lengths have no values here, so each token counts as seeing the longest
    segment's tokens: exact for segments of one length, else too many. Causal: half. Backward has five products where
    forward has two."""
    named = {argument.name: args[n] if n < len(args) else kwargs.get(argument.name, argument.default_value)
             for n, argument in enumerate(schema.arguments)}  # fmt: skip
    tokens, heads, width = named["query"].shape
    forward = 4 * tokens * int(named["max_k"]) * heads * width
    whole = forward * 5 // 2 if "backward" in name else forward
    return whole // 2 if named["is_causal"] else whole
