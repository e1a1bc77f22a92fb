"""Steps of the whole model beside its decoder's alone: their rows, and what comes of them."""

import json
from pathlib import Path
from typing import Any

import pytest

from dhp.core.axes import Degrees
from dhp.core.graph import Node
from dhp.core.reports import Spent, StageReport
from dhp.step.schedule import Backward, Forward, make_schedule
from experiments.pair import TimedHere, make_pair
from experiments.text_ratio.__main__ import FEATURES, WORDS, Rows, as_text, deal, main, of_passes
from experiments.text_ratio.took import Took, lost, replayed, reported
from tests.helpers.figures import Sentences, cells, missing, rows
from tests.helpers.graphs import make_graph

TWO = Degrees(data=2), Degrees(data=2)


@pytest.mark.parametrize("pictures", [1, 4, 16])
def test_even_rows_have_as_many_tokens_whatever_pictures_they_have(pictures: int) -> None:
    (sample,) = Rows(pictures, even=True).samples(1)
    assert len(sample.pixels) == pictures and sum(sample.mm_token_type_ids) == FEATURES
    assert len(sample.input_ids) == FEATURES + pictures + WORDS
    assert [len(pixels) for pixels in sample.pixels] == [4 * FEATURES // pictures] * pictures


def test_uneven_rows_differ_and_some_have_no_picture() -> None:
    samples = Rows(4, even=False).samples(64)
    shown = [int(sum(sample.mm_token_type_ids)) for sample in samples]
    assert [bool(count) for count in shown[:4]] == [True, True, True, False]
    seen = [count for count in shown if count]
    assert len(set(seen)) > 8 and 0.7 * FEATURES < sum(seen) / len(seen) < 1.4 * FEATURES


def test_small_pictures_have_sides_of_28_to_112_pixels() -> None:
    samples = Rows(16, even=False, small=True).samples(8)
    sides = {round(len(pixels) ** 0.5) for sample in samples for pixels in sample.pixels}
    assert sides == {2, 4, 6, 8} and all(len(sample.pixels) == 16 for sample in samples)


def test_a_text_row_is_as_long_and_learns_the_same() -> None:
    (sample,) = Rows(4, even=True).samples(1)
    text = as_text(sample)
    assert len(text.input_ids) == len(sample.input_ids) and (text.labels == sample.labels).all()
    assert text.pixels == () and not text.mm_token_type_ids.any()


def test_a_step_of_text_has_no_work_for_the_tower_and_a_pass_all_of_it(made_model: str) -> None:
    samples = Rows(1, even=True).samples(16)
    alone = deal(made_model, TWO, [as_text(sample) for sample in samples], 1)
    assert alone.info.flops["vision"] == 0 and not any(route.pairs for route in alone.routes["vision"])
    each, whole = deal(made_model, TWO, samples, 1), deal(made_model, TWO, samples, 8)
    assert (len(each.work["vision"]), len(whole.work["vision"])) == (8, 1)
    assert each.info.flops == whole.info.flops and each.info.tokens == alone.info.tokens
    assert [edge.batch for edge in of_passes(make_graph(), 8).edges] == [8]


def test_measured_passes_are_played_on_devices_of_their_own() -> None:
    """Two devices and micro-batches. Of each the slower rank of the tower takes 2 s forward and 2 back, and the first
    replica 3 and 4: 11 s, and 1.5 for updates."""
    graph, groups = make_pair(*TWO), {stage: TimedHere(stage, None, None) for stage in ("vision", "text")}
    seconds = {"vision": ((1.0, 2.0), (1.0, 2.0)), "text": ((3.0, 1.0), (4.0, 1.0))}
    for stage, of_kind in seconds.items():
        for kind, of_rank in zip((Forward, Backward), of_kind, strict=True):
            for number, rank in ((m, rank) for m in range(2) for rank in range(2)):
                groups[stage].seconds[kind(Node(stage), number), rank] = of_rank[rank]
    groups["vision"].others, groups["text"].others = [0.5, 0.5], [1.0, 1.0]
    took = replayed(groups, graph, make_schedule("sequential", graph, 2))
    assert took == Took(23.5, [4.0, 8.0], [14.0, 4.0], 1.5) and took.imbalance == 3.0
    alone = Took(15.0, [0.0, 0.0], [14.0, 4.0], 1.0)
    found = lost(took, alone, 0.5)
    wanted = {"tower": -1.5, "decoder": 0.0, "update": 0.5, "collectives": 0.0, "imbalance": -2.0, "waiting": 4.0}
    assert {cause: share * 22.5 for cause, share in found.items()} == pytest.approx(wanted)
    assert sum(found.values()) == pytest.approx(23.5 / 22.5 - 1)


def test_passes_of_a_run_are_those_of_its_reports() -> None:
    def report(rank: int, passes: float, update: float, sums: float) -> StageReport:
        spent = {"forward": Spent(passes, sums), "backward": Spent(passes, 0.0), "optimizer": Spent(update, sums)}
        return StageReport(rank, None, 0.0, {}, None, {}, spent=spent)

    of_text, of_vision = [report(0, 2.0, 0.5, 0.1), report(1, 3.0, 0.5, 0.2)], [report(0, 1.0, 0.0, 0.0)] * 2
    found = reported(9.0, {"vision": of_vision, "text": of_text})
    assert found == Took(9.0, [2.0, 2.0], [4.0, 6.0], 0.5, pytest.approx(0.3))


def test_rows_cut_over_ranks_have_no_replay(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--replay", "--layouts", "2+2 SP+TP"])
    assert "2+2 SP+TP cuts rows over" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("replay", [False, True])
def test_a_case_is_measured(replay: bool, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    asked = [
        *["--replay"] * replay,
        "--rounds",
        "1",
        "--layouts",
        "1+1",
        "--pictures",
        "4",
        "--shares",
        "0.3",
        "--only",
        "even",
    ]
    main(asked)
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert [row["way"] for row in rows] == ["sequential", "vision_ahead", "whole step"]
    for row in rows:
        assert row["ratio"] > 0 and abs(row["tower_share"] - 0.3) < 0.05
        share = row["tower_share"]
        assert row["efficiency"] == pytest.approx(row["ratio"] / (1 - share), rel=2e-3)
        assert 1 + sum(row["lost"].values()) == pytest.approx(1 / row["efficiency"], rel=5e-3)
    assert replay or rows[1]["calls"] > 4 * rows[2]["calls"] > 0
    assert [row["how"] for row in rows] == ["replay" if replay else "wall"] * 3 and not rows[0]["small"]
    assert rows[0]["command"] == f"python -m experiments.text_ratio {' '.join(asked)}"


PAGE = "experiments/text_ratio/README.md"


WALL, ONE_PASS = "wall", "whole step"
CAUSES = ("tower", "decoder", "imbalance", "collectives", "update", "waiting")


def kind(row: dict[str, Any]) -> str:
    return "even" if row["even"] else "uneven"


def sentences() -> Sentences:
    found = [row for row in rows("text_ratio", how=WALL) if not row.get("small")]
    for case in dict.fromkeys((row["layout"], row["pictures"], kind(row), row["tower_share"]) for row in found):
        of = {r["way"]: r for r in found if (r["layout"], r["pictures"], kind(r), r["tower_share"]) == case}
        figures = [f"{of[way]['efficiency']:.2f}" for way in ("sequential", "vision_ahead", ONE_PASS)]
        figures.append(f"{of[ONE_PASS]['ratio']:.2f}")
        yield PAGE, cells(case[0], str(case[1]), case[2], f"{case[3]:.3f}", *figures)
    for row in (row for row in rows("text_ratio") if row.get("lost") and row["way"] != "vision_ahead"):
        lost = [f"{row['lost'][cause]:.2f}" for cause in CAUSES]
        about = (row["layout"], row["how"], kind(row), f"{row['tower_share']:.3f}", row["way"])
        yield PAGE, cells(*about, f"{row['efficiency']:.2f}", *lost)
    for row in (row for row in rows("text_ratio") if row.get("small")):
        (ahead,) = rows("text_ratio", small=True, layout=row["layout"], way="vision_ahead")
        figures = [f"{row['step_s']:.2f}", f"{row['step_s'] / ahead['step_s']:.2f}", f"{row['efficiency']:.2f}"]
        yield PAGE, cells(row["layout"], row["way"], str(row["calls"]), *figures)
    all_of = [100 * row["efficiency"] for row in found if row["way"] == ONE_PASS]
    yield "README.md", f"has {min(all_of):.0f} to {max(all_of):.0f}% of its decoder's own efficiency on text"
    for even, what in ((True, "even pictures"), (False, "uneven ones")):
        one = [row["efficiency"] for row in found if row["way"] == ONE_PASS and row["even"] is even]
        yield PAGE, f"{min(one):.2f} to {max(one):.2f} with {what}"


def test_the_page_has_the_rows() -> None:
    assert len(list(sentences())) > 60 and missing(sentences()) == []
