"""Collectives and bytes that ranks of a layer send.

Sharded attention in closed form after USP (Fang and Zhao 2024, section 4). Letters: S tokens of the sequence, R ring
ranks, U Ulysses ranks in each, N = R·U; H = heads × head dimension, H_kv the same of keys and values; e bytes an
element, x of the gradients of keys and values on their way (float32: 4). Tests hold all of it against the bytes that
running ranks count."""

from dataclasses import dataclass

from dhp.core.heads import HeadShares, share_heads
from dhp.plan.count.rates import Operation, Transfer


@dataclass(frozen=True)
class DividedAttention:
    """A sequence of so many tokens over Ulysses ranks, which exchange heads, and ring ranks. dim: of a head;
    element_bytes: of a value, exact_bytes: of one that sums; gather: the ring fetches all keys and values at once."""

    tokens: int
    heads: int
    kv_heads: int
    dim: int
    ring: int
    exchanging: int
    element_bytes: int
    exact_bytes: int = 4
    gather: bool = False

    @property
    def _a_rank(self) -> float:
        return self.tokens / (self.ring * self.exchanging)  # S/N

    @property
    def _sent_kv_width(self) -> int:
        return self._shares.count * self.exchanging * self.dim

    @property
    def _shares(self) -> HeadShares:
        return share_heads(self.heads, self.kv_heads, self.exchanging)

    def exchange(self) -> float:
        """Bytes a rank sends to its Ulysses ranks, forward; backward sends as many: e (S/N) (2H + 2H_kv) (U−1)/U."""
        widths = 2 * self._shares.a_rank * self.exchanging * self.dim + 2 * self._sent_kv_width
        return self.element_bytes * self._a_rank * widths * (self.exchanging - 1) / self.exchanging

    def ring_forward(self) -> float:
        """Bytes a rank sends around the ring: 2 e (S/N) H_kv (R−1)."""
        return 2 * self.element_bytes * self._a_rank * self._sent_kv_width * (self.ring - 1)

    def ring_backward(self) -> float:
        """2 (S/N) H_kv (e + x) (R−1): keys and values again, and their gradients, which start at the first other rank.

        Two ranks, and those that fetch all at once, keep the keys and values of forward: 2 (S/N) H_kv x (R−1)."""
        again = 0 if self.gather or self.ring == 2 else self.element_bytes
        return 2 * self._a_rank * self._sent_kv_width * (again + self.exact_bytes) * (self.ring - 1)

    def sends(self, back: bool) -> tuple[Transfer, ...]:
        """The same as collectives of a layer: forward, or back. Ring ranks lie `exchanging` apart."""
        others = max(1, self.ring - 1)
        around = self.ring_backward() if back else self.ring_forward()
        whole = self.exchange() * self.exchanging / max(1, self.exchanging - 1)
        found = (
            Transfer("all-to-all", whole, self.exchanging),
            Transfer("send", around / others, self.ring, self.exchanging, others),
        )
        return tuple(one for one in found if one.ranks > 1)


@dataclass(frozen=True)
class DividedState:
    """A layer that carries state along a row over Ulysses and ring ranks. tokens: of one rank; values: of a token,
    there and back; heads: that ranks share; state: numbers that a piece sends and gets to pass on the state of all."""

    tokens: int
    values: int
    heads: int
    state: int
    ring: int
    exchanging: int
    element_bytes: int
    exact_bytes: int = 4

    def sends(self) -> tuple[Transfer, ...]:
        """The collectives of a layer, forward or back, for one sample in a row, in zigzag pieces: tokens for heads, and
        where these are too few for all ranks, what two pieces a rank (its last has one) do to a state, and the state
        before each.

        A convolution's borders are left out, which are a few tokens."""
        ranks = self.ring * self.exchanging
        exchanging = next(degree for degree in (ranks, self.exchanging, 1) if self.heads % degree == 0)
        passing = ranks // exchanging
        pieces = 2 - 1 / passing
        found = (
            Transfer("all-to-all", self.element_bytes * self.tokens * self.values, exchanging),
            Transfer("all-to-all", self.exact_bytes * pieces * self.state / exchanging, passing, exchanging),
        )
        return tuple(one for one in found if one.ranks > 1)


@dataclass(frozen=True)
class DividedMatrices:
    """A layer whose matrices are cut over `tensor` ranks, each block's output summed over them. rows: tokens or patches
    of a micro-batch; width: of a state; blocks: of a layer, attention and MLP. sharded_norms: between the blocks each
    rank has the states of its own rows."""

    tensor: int
    rows: int
    width: int
    element_bytes: int
    sharded_norms: bool = False
    blocks: int = 2

    def sends(self, back: bool) -> tuple[Transfer, ...]:
        """The collectives of a layer. With sharded norms a sum becomes a scatter of it and a gather, and backward each
        block gathers its input again; shares are padded to equal numbers of rows."""
        if self.tensor == 1:
            return ()
        if not self.sharded_norms:
            return (Transfer("all-reduce", self._bytes(self.rows), self.tensor, times=self.blocks),)
        padded = self._bytes(-(-self.rows // self.tensor) * self.tensor)
        return (
            Transfer("all-gather", padded, self.tensor, times=self.blocks * (2 if back else 1)),
            Transfer("reduce-scatter", padded, self.tensor, times=self.blocks),
        )

    def _bytes(self, rows: int) -> float:
        return rows * self.width * self.element_bytes


_COUNT_BYTES = 8  # of the number of rows that an expert gets from a rank


@dataclass(frozen=True)
class DividedExperts:
    """A layer whose `count` experts `sharing` replicas share out, whose ranks lie `stride` apart. rows: pairs of a
    token and an expert that it visits, of one rank's tokens; width: of a state."""

    sharing: int
    count: int
    rows: int
    width: int
    element_bytes: int
    stride: int = 1

    def sends(self, back: bool) -> tuple[Transfer, ...]:
        """The collectives of a layer, were all experts visited alike: rows go and come, and forward their numbers
        before them; backward, the gradients of both. A recomputed layer keeps the numbers, and sends rows again."""
        if self.sharing == 1:
            return ()
        among = self.sharing, self.stride
        rows = Transfer("all-to-all", self.rows * self.width * self.element_bytes, *among, 2, again=True)
        numbers = Transfer("all-to-all", self.count * _COUNT_BYTES, *among, again=False)
        return (rows,) if back else (numbers, rows)


@dataclass(frozen=True)
class DividedWeights:
    """A stage's weights and gradients over the `ranks` that hold the same slices, which lie `stride` apart.

    parameters: on one of them, were nothing cut; again: of them, those that backward gathers a second time, in layers;
    experts: of them, all in layers, those that fewer ranks hold, as replicas share experts out; copies: so many.
    weight_bytes, gradient_bytes: of a value as it is sent. zero_stage: what is cut; by_torch: FSDP2 cuts it, not
    DeepSpeed, which sums whole buckets on all ranks in its stages 1 and 2, in stage 2 behind each micro-batch."""

    ranks: int
    parameters: int
    weight_bytes: int
    gradient_bytes: int
    zero_stage: int = 0
    by_torch: bool = False
    again: int = 0
    stride: int = 1
    experts: int = 0
    copies: int = 1

    def forward(self, first: bool) -> tuple[Transfer, ...]:
        """Of a micro-batch. first: of the step."""
        gathers = self.zero_stage == 3 or (self.by_torch and first)
        return self._sent("all-gather", self.parameters, self.weight_bytes) if gathers else ()

    def backward(self, last: bool) -> tuple[Transfer, ...]:
        """Of a micro-batch. last: of the step."""
        gradients = self.parameters, self.gradient_bytes
        if self.zero_stage == 3 or self.by_torch:
            again = self._sent("all-gather", self.again, self.weight_bytes) if self.zero_stage == 3 else ()
            return again + self._sent("reduce-scatter", *gradients)
        return self._sent("all-reduce", *gradients) if last or self.zero_stage == 2 else ()

    def update(self) -> tuple[Transfer, ...]:
        """Behind the optimizer, where it updates a share of weights that all ranks hold."""
        shares = self.zero_stage in (1, 2) and not self.by_torch
        return self._sent("all-gather", self.parameters, self.weight_bytes) if shares else ()

    def _sent(self, operation: Operation, parameters: int, value_bytes: int) -> tuple[Transfer, ...]:
        experts = min(self.experts, parameters)
        found = (
            Transfer(operation, (parameters - experts) * value_bytes, self.ranks, self.stride),
            Transfer(operation, experts * value_bytes, self.copies, self.stride * self.ranks // self.copies),
        )
        return tuple(one for one in found if one.ranks > 1 and one.nbytes)
