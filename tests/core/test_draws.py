"""Draws of adapters: a function of token, module and column, as many as asked for, and with nothing in common."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dhp.core import draws
from dhp.core.draws import TokenKeys, column_bits, current_keys, draw_dropped, draw_key, drawing, keys_of

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
