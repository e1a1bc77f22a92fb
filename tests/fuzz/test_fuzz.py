"""Random layouts, families and data beside the plain model, for minutes: `pytest -m fuzz --fuzz-minutes=5 -s`.

Every draw must equal the plain model or be refused by a ConfigError before anything starts; ranks agree on each of
their collectives. Not by TORCH_DISTRIBUTED_DEBUG=DETAIL, which takes Muon's exchanges of rows for a mismatch."""

import time
from collections import Counter
from pathlib import Path

import pytest

from dhp.data.sampling.sampler import BatchLayout
from dhp.models import lora
from tests.engine.test_declared_families import PICTURES_EVERYWHERE
from tests.fuzz.draws import KINDS, STATES, Draw, count_met, draws
from tests.fuzz.trial import DEFECT, deal_unevenly, samples_of, try_draw
from tests.helpers import ranks
from tests.helpers.layouts import FIRST_OUT
from tests.helpers.tiny_families import FAMILIES, save_family


def test_every_family_is_of_one_kind() -> None:
    assert sorted(name for names in KINDS.values() for name in set(names)) == sorted(FAMILIES)


def test_draws_depend_on_the_seed_alone() -> None:
    first, again, other = ([draw for draw, _ in zip(draws(seed), range(50))] for seed in (1, 1, 2))
    assert first == again and first != other
    pairs = {(draw.kind, draw.axes["text states"]) for draw in first[: len(KINDS) * len(STATES)]}
    assert len(pairs) == len(KINDS) * len(STATES)  # each once in the first round


@pytest.mark.parametrize(
    ("layout", "counts"),
    [
        (BatchLayout(2, 1, 2), [[1, 3]]),
        (BatchLayout(2, 2, 1), [[1, 2], [1, 2]]),
        (BatchLayout(1, 2, 2), [[2], [2]]),
        (BatchLayout(1, 1, 4), [[4]]),
    ],
    ids=str,
)
def test_ranks_have_rows_of_differing_numbers_of_samples(layout: BatchLayout, counts: list[list[int]]) -> None:
    dealt = deal_unevenly(range(samples_of(layout)), layout)
    assert [[len(row) for row in micro_batch] for micro_batch in dealt] == counts
    assert [sample for micro_batch in dealt for row in micro_batch for sample in row] == [*range(samples_of(layout))]


@pytest.mark.fuzz
@pytest.mark.timeout(0)
def test_random_layouts(pytestconfig: pytest.Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    minutes, seed = (pytestconfig.getoption(f"--fuzz-{name}") for name in ("minutes", "seed"))
    monkeypatch.setattr(ranks, "TIMEOUT_S", 120)
    monkeypatch.setattr(lora, "FIRST_OUT", FIRST_OUT)  # as ranks have it
    folders: dict[str, str] = {}
    tried: list[Draw] = []
    words: Counter[str] = Counter()
    defects: list[str] = []
    end = time.monotonic() + 60 * minutes
    for number, draw in enumerate(draws(seed)):
        if time.monotonic() > end:
            break
        if draw.family not in folders:
            folders[draw.family] = str(save_family(draw.family, tmp_path / draw.family))
        begun = time.monotonic()
        verdict = try_draw(draw, folders[draw.family], draw.family in PICTURES_EVERYWHERE)
        tried.append(draw)
        words[verdict.word] += 1
        about = f"[{number}] {verdict.word} {draw.family} {draw.dtype} {time.monotonic() - begun:.1f} s {draw.axes}"
        print(about, verdict.told[:300] if verdict.word != DEFECT else verdict.told, flush=True)
        if verdict.word == DEFECT:
            defects.append(f"{about}\n  {' '.join(draw.overrides)}\n  {verdict.told}")
    print(f"seed {seed}: {dict(words)}\n{count_met(tried)}", flush=True)
    assert not defects, f"{len(defects)} of {len(tried)} draws of seed {seed}:\n" + "\n".join(defects)
