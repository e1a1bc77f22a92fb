"""Forms of states: their bytes are their names, and the default is the exact one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dhp.core.parameters import COMPENSATION, EXACT_STATES, FORMAT_BYTES, FORMS, MASTER, MOMENTS, SUM, WEIGHT


@pytest.mark.parametrize("nbytes", FORMS)
def test_a_form_is_known_by_the_bytes_of_its_pieces(nbytes: int) -> None:
    form = FORMS[nbytes]
    assert form.nbytes == sum(getattr(torch, piece.format).itemsize for piece in form.pieces) == nbytes
    kinds = [piece.kind for piece in form.pieces]
    assert len(set(kinds)) == len(kinds) and {WEIGHT, SUM, *MOMENTS} < set(kinds)
    assert (MASTER in kinds) != (COMPENSATION in kinds) == form.compensated


def test_bytes_of_each_format_are_torchs() -> None:
    assert {name: getattr(torch, name).itemsize for name in FORMAT_BYTES} == FORMAT_BYTES


def test_equations() -> None:
    assert FORMS[EXACT_STATES].equation == "weight(2) + master(4) + sum(4) + exp_avg(4) + exp_avg_sq(4) = 18"
    assert FORMS[12].equation == "weight(2) + compensation(2) + sum(4) + exp_avg(2) + exp_avg_sq(2) = 12"
    assert [FORMS[n].format(SUM) for n in FORMS] == ["float32", "bfloat16", "float32", "bfloat16"]
    with pytest.raises(KeyError):
        FORMS[12].format(MASTER)


def test_the_page_about_memory_has_each_form() -> None:
    page = (Path(__file__).parents[2] / "docs" / "memory.md").read_text(encoding="utf-8")
    for nbytes, form in FORMS.items():
        kinds = {piece.kind: piece for piece in form.pieces}
        (copy,) = kinds.keys() - {WEIGHT, SUM, *MOMENTS}
        formats = (kinds[WEIGHT].format, f"{copy}, {kinds[copy].format}", kinds[SUM].format, kinds[MOMENTS[0]].format)
        gathered = nbytes if form.compensated else nbytes - kinds[WEIGHT].nbytes  # from the master weight itself
        assert f"| {' | '.join(map(str, (nbytes, *formats, gathered)))} |" in page
