"""Collectives that ranks record, and what they draw."""

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dhp.core import collectives, draws
from dhp.core.collectives import RECORD, CallRecord, watch_layers
from dhp.core.draws import TokenKeys, column_bits, current_keys, draw_dropped, draw_key, drawing, keys_of
from dhp.core.tracing import take_waited
from dhp.parallel.comm import build_mesh
from tests.helpers import ranks
from tests.helpers.ranks import LocalGroup, _Caller


def run_checked(function: Any, size: int = 2, *arguments: Any) -> list[Any]:
    with LocalGroup(_Caller, size, checked=True) as group:
        return group.execute_all("call", function, *arguments)


Known = tuple[str, tuple[int, ...], dict[str, int]]


def _known() -> Known:
    return str(RECORD.last), () if RECORD.last is None else RECORD.last.members, RECORD.numbers


def _alike() -> Known:
    dist.all_reduce(torch.ones(3))
    dist.all_gather_into_tensor(torch.empty(4, 2), torch.ones(2, 2))
    return _known()


def test_the_last_call_and_the_number_of_all_are_known() -> None:
    last = "_allgather_base_(float32[4, 2], float32[2, 2]), call 2 in group 0 of 2 ranks"
    assert run_checked(_alike) == [(last, (0, 1), {"0": 2})] * 2


def test_before_the_first_call_there_is_none() -> None:
    assert run_checked(_known, 1) == [("None", (), {})]


def _apart() -> Known:
    """Ranks 0 and 2 in a group of their own."""
    pair = dist.new_group([0, 2])
    if dist.get_rank() != 1:
        dist.all_reduce(torch.ones(1), group=pair)
    return _known()


def test_members_are_ranks_of_the_stage() -> None:
    (last, members, _), (none, *_), _ = run_checked(_apart, 3)
    assert last.endswith("of 2 ranks") and members == (0, 2) and none == "None"


def test_what_holds_a_process_is_one_wait_however_deep(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10.0]
    monkeypatch.setattr(collectives.time, "monotonic", lambda: now[0])
    record = CallRecord()
    take_waited()
    with pytest.raises(ZeroDivisionError), record.held():
        now[0] = 11.0
        with record.held():
            now[0] = 13.0
        assert record.held_since == 10.0
        raise ZeroDivisionError
    assert record.held_since is None and take_waited() == 3.0


class Layer(nn.Module):
    def forward(self, states: torch.Tensor) -> torch.Tensor:
        whole = states.clone()
        dist.all_reduce(whole)
        return whole


def _exchanged() -> None:
    """Two layers of one shape, which the second rank calls the other way round."""
    layers = {"layer 0": Layer(), "layer 1": Layer()}
    watch_layers(layers)
    order = list(layers.values()) if dist.get_rank() == 0 else list(layers.values())[::-1]
    states = torch.ones(3)
    for layer in order:
        states = layer(states)


def test_two_layers_of_equal_shape_exchanged() -> None:
    with pytest.raises(RuntimeError, match="different collectives: .* in layer [01], but rank .* in layer [01]"):
        run_checked(_exchanged)


def _through_backward() -> None:
    class Sum(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, states: torch.Tensor) -> torch.Tensor:
            return states.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            summed = gradient.clone()
            dist.all_reduce(summed)
            return summed

    class Communicating(nn.Module):
        def forward(self, states: torch.Tensor) -> torch.Tensor:
            return Sum.apply(states) * 1.0

    layers = {"layer 0": Communicating(), "layer 1": Communicating()}
    watch_layers(layers)
    states = torch.ones(3, requires_grad=True)
    order = list(layers.values()) if dist.get_rank() == 0 else list(layers.values())[::-1]
    for layer in order:
        states = layer(states)
    states.sum().backward()


def test_two_layers_exchanged_in_backward() -> None:
    with pytest.raises(RuntimeError, match="in the backward of layer [01], but rank .* in the backward of layer [01]"):
        run_checked(_through_backward)


def _one_more() -> None:
    for _ in range(1 + dist.get_rank()):
        dist.all_reduce(torch.ones(3))


def test_one_call_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "AGREE_S", 1)
    with pytest.raises(RuntimeError, match=r"rank 1 waits in allreduce_.*; ranks \[0\] of its group did not make"):
        run_checked(_one_more)


def _another_shape() -> None:
    dist.all_reduce(torch.ones(3 + dist.get_rank()))


def _another_kind() -> None:
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(2))
    else:
        dist.broadcast(torch.ones(2), 0)


@pytest.mark.parametrize("function", [_another_shape, _another_kind])
def test_another_shape_or_kind(function: Any) -> None:
    with pytest.raises(RuntimeError, match="ranks of one group make different collectives"):
        run_checked(function)


def _uneven_rows() -> list[int]:
    """Ranks may exchange other numbers of rows: 1 and 2 to oneself, 2 and 1 to the other."""
    own = 1 + dist.get_rank()
    send = [own, 3 - own] if dist.get_rank() == 0 else [3 - own, own]
    receive = [1, 1] if dist.get_rank() == 0 else [2, 2]
    coming = torch.empty(sum(receive), 2)
    dist.all_to_all_single(coming, torch.ones(3, 2), receive, send)
    return list(coming.shape)


def test_all_to_all_of_differing_numbers_of_rows_agrees() -> None:
    assert run_checked(_uneven_rows) == [[2, 2], [4, 2]]


def _in_subgroups() -> int:
    """Groups that share no rank may make as many calls as they like."""
    from dhp.core.axes import Degrees

    mesh = build_mesh("cpu", Degrees(data=2, tensor=2))
    for _ in range(1 + mesh.get_local_rank("data")):
        dist.all_reduce(torch.ones(1 + mesh.get_local_rank("data")), group=mesh.get_group("tensor"))
    assert RECORD.last is not None
    return RECORD.last.number


def test_groups_beside_each_other_are_not_compared() -> None:
    assert run_checked(_in_subgroups, 4) == [1, 1, 2, 2]


def _messages_between() -> int:
    """What only some ranks send is no collective, and moves no number."""
    from dhp.parallel.comm import exchange_rows

    rank = dist.get_rank()
    send, receive = ([0, 1], [0, 0]) if rank == 0 else ([0, 0], [1, 0])
    exchange_rows(torch.ones(sum(send), 2), send, receive, dist.group.WORLD)
    dist.all_reduce(torch.ones(3))
    assert RECORD.last is not None
    return RECORD.last.number


def test_messages_are_not_counted_among_collectives() -> None:
    assert run_checked(_messages_between) == [1, 1]


CPU = torch.device("cpu")
TOKENS, COLUMNS = 2048, 1024
DRAW_KEY = -7147511889477673878
KEYS = [6238072747940578789, -2606959012126976886, -2727240531557807870]
BITS = [1452414493, -606979945, 508780269]
DROPPED = [2973, 3567, 2312, 973]


def drawn(share: float = 0.1, module: str = "layers.0.q_proj", step: int = 0, columns: int = COLUMNS) -> Tensor:
    """Which elements of two samples of a step are dropped, bool [tokens, columns]."""
    runs = [(draw_key(0, step, "made", sample, 1), 0, TOKENS // 2) for sample in range(2)]
    return draw_dropped(keys_of(runs), draw_key(module), column_bits(0, columns, CPU), share)


def deviation(one: Tensor, other: Tensor, share: float) -> float:
    """By how many standard deviations two sets of draws are dropped together more often than by chance."""
    centred = (one.double() - share) * (other.double() - share)
    return float(centred.mean()) * one.numel() ** 0.5 / (share * (1 - share))


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5, 0.9])
def test_as_many_as_asked_for(share: float) -> None:
    found = drawn(share).double()
    off = lambda values, count: (values - share).abs().max() / (share * (1 - share) / count) ** 0.5
    assert off(found.mean(), TOKENS * COLUMNS) < 4
    assert off(found.mean(1), COLUMNS) < 5 and off(found.mean(0), TOKENS) < 5  # of every token, of every column
    assert float(found.mean(1).var()) == pytest.approx(share * (1 - share) / COLUMNS, rel=0.15)


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_neighbours_have_nothing_in_common(share: float) -> None:
    """Tokens, columns, both, samples, modules, layers, steps."""
    own = drawn(share)
    pairs = [(own[distance:], own[:-distance]) for distance in (1, 2, 7, 64, TOKENS // 2)]
    pairs += [(own[:, distance:], own[:, :-distance]) for distance in (1, 2, 7, 64, 512)]
    pairs += [(own[1:, 1:], own[:-1, :-1]), (own[1:, :-1], own[:-1, 1:])]
    pairs += [(own, drawn(share, module)) for module in ("layers.0.k_proj", "layers.1.q_proj")]
    pairs += [(own, drawn(share, step=1)), (own, drawn(share, step=2))]
    assert max(abs(deviation(*pair, share)) for pair in pairs) < 4.5
    assert deviation(own, own, share) > 100  # which shows what has


def test_corners_of_rectangles_have_nothing_in_common() -> None:
    """As they would have were a draw the sum of a token's and a column's."""
    signs = drawn(0.5).double() * 2 - 1
    for down, right in ((1, 1), (3, 64), (512, 512)):
        corners = signs[down:, right:] * signs[down:, :-right] * signs[:-down, right:] * signs[:-down, :-right]
        assert abs(float(corners.mean())) * corners.numel() ** 0.5 < 4.5


def test_a_draw_depends_on_nothing_else() -> None:
    """Not on which other tokens or columns are drawn, nor in what order, nor on a generator."""
    before, whole = torch.get_rng_state(), drawn(0.3)
    keys = keys_of([(draw_key(0, 0, "made", sample, 1), 0, TOKENS // 2) for sample in range(2)])
    order = torch.arange(TOKENS - 1, -1, -5)
    part = draw_dropped(keys[order], draw_key("layers.0.q_proj"), column_bits(300, 17, CPU), 0.3)
    assert torch.equal(part, whole[order, 300:317])
    assert torch.equal(before, torch.get_rng_state())
    again = keys_of([(draw_key(0, 0, "made", 1, 1), 100, 3)])
    assert torch.equal(again, keys[TOKENS // 2 + 100 :][:3])


def test_keys_stay_what_they_are() -> None:
    """A resumed run, on another machine and Python, draws what the one before would have."""
    assert draw_key(0, 3, "made", 5, 1) == DRAW_KEY
    assert keys_of([(1, 0, 2), (-7, 5, 1)]).tolist() == KEYS
    assert column_bits(0, 3, CPU).tolist() == BITS
    dropped = draw_dropped(keys_of([(1, 0, 4)]), 9, column_bits(0, 12, CPU), 0.5)
    assert [int("".join(map(str, row)), 2) for row in dropped.int().tolist()] == DROPPED


def test_rows_of_states_are_tokens_or_several_of_them_in_one() -> None:
    keys = TokenKeys(keys_of([(3, 0, 12)]), unit=4)
    assert torch.equal(keys.of_rows(12), keys.keys)
    assert torch.equal(keys.of_rows(3), keys.keys[[0, 4, 8]])
    assert keys.of_rows(24) is None and keys.of_rows(4) is None


def test_rows_of_pictures_are_numbered() -> None:
    """Whether layers add a token to each, as a class token, or see others."""
    first, second = keys_of([(3, 0, 4)]), keys_of([(4, 0, 4)])
    both = TokenKeys(torch.cat([first, second]), tile=4)
    for each in (1, 4, 5, 64):
        rows = both.of_rows(2 * each)
        assert len(rows.unique()) == 2 * each
        assert torch.equal(rows[:each], TokenKeys(first, tile=4).of_rows(each))
        assert torch.equal(rows[each:], TokenKeys(second, tile=4).of_rows(each))
    one = TokenKeys(keys_of([(3, 0, 1), (4, 0, 1)]), tile=1)
    assert torch.equal(one.of_call((1,)).of_rows(7), TokenKeys(keys_of([(4, 0, 1)]), tile=1).of_rows(7))
    assert len(one.of_call(()).of_rows(7)) == 7
    with pytest.raises(AssertionError, match=r"\(0, 1\) go together"):
        one.of_call((0, 1))


def test_parts_of_states_are_cut_as_torch_cuts_them() -> None:
    keys = TokenKeys(keys_of([(3, 0, 14)]))
    for number in range(3):
        wanted = keys.keys.view(2, 7).tensor_split(3, dim=-1)[number].flatten()
        assert torch.equal(keys.part((2, 7), number, 3).keys, wanted)


def test_parts_of_shares_are_gathered_from_all_ranks() -> None:
    """Seven tokens of four ranks, two each, the last with one that fills up: what a block is given of the first part
    is each rank's first token."""
    keys = TokenKeys(keys_of([(3, 0, 7)]), ranks=4)
    assert torch.equal(keys.part((1, 2), 0, 2).keys, keys.keys[[0, 2, 4, 6]])
    assert torch.equal(
        keys.part((1, 2), 1, 2).keys, torch.cat([keys.keys[[1, 3, 5]], torch.zeros(1, dtype=torch.long)])
    )


def test_groups_of_samples_have_the_keys_of_their_tokens() -> None:
    keys, order = TokenKeys(keys_of([(3, 0, 5)])), torch.tensor([4, 0, 2, 1, 3])
    first, second = keys.chosen(order).split([2, 3])
    assert torch.equal(first.keys, keys.keys[[4, 0]]) and torch.equal(second.keys, keys.keys[[2, 1, 3]])
    assert keys.chosen(None) is keys


def test_tokens_are_known_in_the_block_and_in_its_thread_alone() -> None:
    keys, others = TokenKeys(keys_of([(3, 0, 5)])), []
    with drawing(keys):
        thread = threading.Thread(target=lambda: others.append(current_keys()))
        thread.start()
        thread.join()
        with drawing(None):
            assert current_keys() is None
        assert current_keys() is keys
    assert current_keys() is None and others == [None]


class _Largest(TorchDispatchMode):
    """bytes: of the largest tensor of numbers, not of truths, that was made."""

    bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **kwargs or {})
        if isinstance(made, Tensor) and made.dtype != torch.bool:
            self.bytes = max(self.bytes, made.nbytes)
        return made


def test_a_gpu_has_little_more_than_the_draws_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tensors of bits at a time, whatever the states' size: forecasts of memory do not count them."""
    wanted = drawn(columns=1 << 14)
    monkeypatch.setitem(draws._CHUNK_ELEMENTS, "cpu", draws._CHUNK_ELEMENTS["cuda"])
    with _Largest() as largest:
        found = drawn(columns=1 << 14)
    assert found.nbytes == 32 << 20 and largest.bytes == 8 << 20
    assert torch.equal(found, wanted)
