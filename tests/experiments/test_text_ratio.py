"""Steps of the whole model beside its decoder's alone: their rows, and what comes of them."""

import json
from pathlib import Path

import pytest

from dhp.core.axes import Degrees
from experiments.text_ratio.__main__ import FEATURES, WORDS, Rows, as_text, deal, main, of_passes
from tests.helpers.figures import Sentences, missing, rows
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


@pytest.mark.slow
def test_a_case_is_measured(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    asked = ["--rounds", "1", "--layouts", "1+1", "--pictures", "4", "--shares", "0.3", "--only", "even"]
    main(asked)
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert [row["way"] for row in rows] == ["sequential", "vision_ahead", "whole step"]
    for row in rows:
        assert row["ratio"] > 0 and abs(row["tower_share"] - 0.3) < 0.05
        share = row["tower_share"]
        assert row["calls"] > 0
        assert row["efficiency"] == pytest.approx(row["ratio"] / (1 - share), rel=2e-3)
    assert rows[1]["calls"] > 4 * rows[2]["calls"] and not rows[0]["small"]
    assert rows[0]["command"] == f"python -m experiments.text_ratio {' '.join(asked)}"


PAGE = "experiments/text_ratio/README.md"


def sentences() -> Sentences:
    found = [row for row in rows("text_ratio") if not row.get("small")]
    for case in dict.fromkeys((row["layout"], row["pictures"], row["even"]) for row in found):
        of = {row["way"]: row for row in found if (row["layout"], row["pictures"], row["even"]) == case}
        cells = [f"{of[way]['efficiency']:.2f}" for way in ("sequential", "vision_ahead", "whole step")]
        share, kind = f"{of['sequential']['tower_share']:.3f}", "even" if case[2] else "uneven"
        yield (
            PAGE,
            f"| {case[0]} | {case[1]} | {kind} | {share} | {' | '.join(cells)} | {of['whole step']['ratio']:.2f} |",
        )
    for row in (row for row in rows("text_ratio") if row.get("small")):
        (ahead,) = rows("text_ratio", small=True, layout=row["layout"], way="vision_ahead")
        ratio = row["step_s"] / ahead["step_s"]
        yield (
            PAGE,
            (
                f"| {row['layout']} | {row['way']} | {row['calls']} | {row['step_s']:.2f} | {ratio:.2f} | "
                f"{row['efficiency']:.2f} |"
            ),
        )
    all_of = [100 * row["efficiency"] for row in found if row["way"] == "whole step"]
    yield "README.md", f"has {min(all_of):.0f} to {max(all_of):.0f}% of its decoder's own efficiency on text"
    for even, kind in ((True, "even pictures"), (False, "uneven ones")):
        one = [row["efficiency"] for row in found if row["way"] == "whole step" and row["even"] is even]
        yield PAGE, f"{min(one):.2f} to {max(one):.2f} with {kind}"


def test_the_page_has_the_rows() -> None:
    assert len(list(sentences())) == 21 and missing(sentences()) == []
