"""Long rows: what is measured, on rows that are short."""

import argparse
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from dhp.batch.row_shards import SequenceGroups, grouped_plan
from dhp.core.axes import Degrees
from dhp.data.balance.packs import Loads, from_groups
from experiments.long_context import inference, video
from experiments.long_context.long_sets import SETS, TILE, _held, draw, kinds_of, places, shared_row, sp_ratios
from experiments.long_context.steps import ALONE, PEER, Way, _longest, _require_same, count
from experiments.long_context.steps import longest_prompts as longest
from experiments.long_context.work import make_model, make_row
from experiments.pair import TEXT, VISION, on_ranks
from experiments.small import START
from tests.helpers.figures import Sentences, missing, rows

BUDGET = 3 << 19


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("long_context"))


def test_a_row_is_all_text_and_all_learned() -> None:
    row = make_row(100)
    assert (len(row.input_ids), row.target_tokens, row.pixels) == (100, 99, ())


def test_pictures_stay_with_their_tokens_or_are_shared_out() -> None:
    """A row of one sample of eight pieces from either end: pictures of the first four are with four of the ranks."""
    loads, packs = Loads(np.array([8]), np.array([4096])), from_groups(np.arange(1))
    plan = shared_row(packs, loads, 0, "random")
    assert _held(plan, [np.arange(4) * TILE]).tolist() == [1, 1, 1, 1, 0, 0, 0, 0]
    assert _held(plan, [np.arange(16) * TILE]).tolist() == [2] * 8
    by_token, evenly = sp_ratios(packs, loads, "random")
    assert by_token > 0.1 and evenly == 0


def test_pictures_of_a_sample_are_one_behind_another() -> None:
    starts = places(8192, 20, np.random.default_rng(0))
    assert len(starts) == 20 and (np.diff(starts) >= TILE).all()
    assert starts[0] >= 0 and starts[-1] <= 8192 - TILE and len(set(np.diff(starts).tolist())) > 5
    assert places(2 * TILE, 2, np.random.default_rng(0)).tolist() == [0, TILE]


def test_sets_fit_their_limits() -> None:
    for made in SETS:
        loads = made.loads()
        assert loads.text.max() <= made.tokens and loads.vision.max() == made.pictures[1]
        assert (loads.text > loads.vision * TILE).all()


def test_a_rank_is_drawn_by_what_it_has(tmp_path: Path) -> None:
    lengths = [4096, 256, 256]
    groups = SequenceGroups((0, 1), ((), ()), ((), (2,)))
    kinds = kinds_of(grouped_plan(lengths, 2, 1, groups), 1024)
    assert kinds.tolist() == [[2048 / 2176, 128 / 2176, 0.0], [2048 / 2432, 128 / 2432, 256 / 2432]]
    loads = Loads(np.zeros(300), np.full(300, 64))
    picture = tmp_path / "sampler.png"
    draw({"all": from_groups(np.arange(300))}, loads, 2, 2, 36864.0, picture)
    with Image.open(picture) as image:
        assert image.size[0] > 300


@pytest.mark.slow
def test_one_stage_keeps_text_beside_its_frames_or_frames_beside_their_tokens(tmp_path: Path) -> None:
    """Row 2 of the experiment: frames are even by pictures, tokens by tokens, and both in two stages."""
    sample, degrees = video._row(2), Degrees(ulysses=2)
    made = video.save_even_model(tmp_path, **video.WIDTHS)

    def counts(way: str) -> tuple[list[int], list[int], int]:
        work = video._dealt(made, degrees, degrees, sample, way).work
        ids = [one.tensors["input_ids"] for one in work[TEXT][0]]
        return [len(one.pixels) for one in work[VISION][0]], [one.shape[-1] for one in ids], int(ids[1][0, 0])

    assert counts(video.BY_PICTURE) == ([1344, 1280], [542, 1055], START)
    assert counts(video.BY_TOKEN)[:2] == ([1664, 960], [798, 799])
    assert counts(video.TWO)[:2] == ([1344, 1280], [798, 799])


def test_layers_of_the_decoder_are_watched() -> None:
    model = nn.Module()
    model.visual = nn.ModuleList([nn.Linear(2, 2) for _ in range(5)])
    model.layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    watch = inference.Watch(model)
    for layer in (*model.visual, *model.layers, model.layers[0]):
        layer(torch.ones(2))
    assert [number for number, _, _ in watch.spans] == [0, 1, 0]
    assert all(begin < end for _, begin, end in watch.spans)


@pytest.mark.slow
def test_one_rank_works_at_a_time_where_layers_are_over_the_ranks(model: str, tmp_path: Path) -> None:
    picture = tmp_path / "schedule.png"
    found = list(inference.measure_schedule(model, argparse.Namespace(plot=picture)))
    busy = {way: [row["busy_share"] for row in found if row["way"] == way] for way in {row["way"] for row in found}}
    assert sum(busy[inference.CUT]) < 1.05 < sum(busy["dhp, ulysses 2"])
    assert {row["layers"] for row in found if row["way"] == inference.CUT} == {2}
    assert picture.exists()


@pytest.mark.slow
def test_plain_keeps_most_and_ranks_share(model: str) -> None:
    plain = on_ranks(1, _longest, model, Way("plain", plain=True), BUDGET)
    alone = on_ranks(1, _longest, model, Way("offload", recompute="offload", mlp_chunks=4), BUDGET)
    shared = on_ranks(2, _longest, model, Way("ring", Degrees(ring=2), "offload", 4), BUDGET)
    assert 0 < plain < alone < shared


def test_a_prompt_takes_what_is_made_of_it_and_no_weights() -> None:
    layer, given = nn.Linear(8, 16, bias=False), torch.ones(4, 8)
    assert count(layer, lambda: layer(given)) == 4 * 16 * 4
    assert count(layer, lambda: (layer(given), layer(given))) == 2 * 4 * 16 * 4
    assert count(layer, lambda: layer.weight.t()) == 0


@pytest.mark.slow
def test_ranks_share_a_prompt_and_layers_over_ranks_do_not(model: str) -> None:
    ring, layers = "dhp, ring 2", f"{inference.CUT}, 2"
    alone, (taken,) = on_ranks(1, longest, model, [ALONE], BUDGET)[ALONE]
    assert 0 < taken <= BUDGET
    found = on_ranks(2, longest, model, [ring, layers], BUDGET)
    (of_layers, by_layers), (of_ring, by_ring) = found[layers], found[ring]
    assert 0 < of_layers < 1.5 * alone < of_ring
    assert len(by_layers) == 2 and max(by_ring) < 1.1 * min(by_ring)


@pytest.mark.slow
def test_a_budget_for_no_prompt_is_told(model: str) -> None:
    with pytest.raises(Exception, match="a prompt of 64 tokens takes more than 0.0 MiB; raise --budget-mib"):
        on_ranks(1, longest, model, [ALONE], 1 << 10)


@pytest.mark.slow
def test_an_answer_is_the_same_in_each_way(model: str) -> None:
    told = on_ranks(2, inference._measure, model, 96, 2, 1)
    tokens = {way: found for way, ((found, *_),) in told.items()}
    assert set(tokens) == {inference.PLAIN, inference.CUT, "dhp, ulysses 2", "dhp, ring 2", "dhp, tensor 2"}
    assert all(found == tokens[inference.PLAIN] and len(found) == inference.NEW for found in tokens.values())
    plain, *others = (found[0][3] for found in told.values())
    assert all(abs(2 * other - plain) <= plain // 64 for other in others)


def test_a_way_that_computed_something_else_is_told() -> None:
    _require_same({PEER: 5.0, "ring": 5.00001})
    with pytest.raises(RuntimeError, match=r"differ from the peer's 5.0: \{'ring': 5.1\}"):
        _require_same({PEER: 5.0, "ring": 5.1})


def prompts() -> Sentences:
    """What the README has of the rows that are kept."""
    page, ways = "experiments/long_context/README.md", {"ulysses": "dhp, Ulysses", "ring": "dhp, ring"}
    found = {row["way"]: row for row in rows("long_context", question="longest_prompt")}
    kinds = {inference.CUT: (inference.PLAIN, *(f"{inference.CUT}, {ranks}" for ranks in (2, 4)))}
    kinds |= {title: (ALONE, *(f"dhp, {axis} {ranks}" for ranks in (2, 4))) for axis, title in ways.items()}
    for title, (alone, *others) in kinds.items():
        cells = [f"{found[way]['tokens']:,} ({found[way]['to_one_rank']:.2f})" for way in others]
        yield page, f"| {title} | {found[alone]['tokens']:,} | {' | '.join(cells)} |"
    both = found["dhp, ring 2 × ulysses 2"]
    ring, shared = (f"{found[f'dhp, {axis} 4']['to_one_rank']:.2f} ×" for axis in ("ring", "ulysses"))
    cut = f"{found[f'{inference.CUT}, 4']['to_one_rank']:.2f} ×"
    yield "experiments/PAPERS.md", f"four ranks {ring} (ring) and {shared} (Ulysses) one rank's, layers over them {cut}"
    yield page, f"| dhp, ring 2 × Ulysses 2 | – | – | {both['tokens']:,} ({both['to_one_rank']:.2f}) |"


def test_the_readme_has_the_longest_prompts() -> None:
    assert missing(prompts()) == []
