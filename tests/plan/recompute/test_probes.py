"""Which steps measure, and that none is tried that could take more than there is."""

from __future__ import annotations

import pytest

from dhp.config.layout import CHOICES
from dhp.plan.count.costs import StageCosts, predicted_bytes
from dhp.plan.recompute.planner import at_worst, probes
from tests.plan.made import MIB, ROWS, arrangement, costs, probed

KINDS = ("window", "full", "window", "full", "window", "full")
IN_TURNS = arrangement(shared=True, outstanding=1, together=False)


@pytest.mark.parametrize("kinds", [KINDS, ("only",), ("only",) * 2, ("only",) * 40, ("full", *("window",) * 9)])
def test_every_kind_is_seen_under_every_choice(kinds: tuple[str, ...]) -> None:
    seen = {(kind, "all") for kind in kinds}
    for choices in probed(kinds):
        assert len(choices) == len(kinds)
        seen |= set(zip(kinds, choices, strict=True))
    assert seen == {(kind, choice) for kind in kinds for choice in CHOICES}


def test_they_take_few_steps_and_little_memory() -> None:
    (choices,) = probed(("only",) * 32)
    assert choices == ("all",) * 27 + ("offload", "linear", "mlp", "light", "none")


def test_the_first_layer_changes_only_where_its_kind_has_no_other() -> None:
    """It holds what all layers share, which would be counted for its choice."""
    assert {choices[0] for choices in probed(("only",) * 3)} == {"all"}
    assert {choices[0] for choices in probed(("full", "window", "window"))} >= set(CHOICES) - {"all"}


def first_seen(known: StageCosts) -> StageCosts:
    """What there is to know after a step that recomputed everything."""
    layers = {kind: {"all": of["all"]} for kind, of in known.layers.items()}
    return StageCosts(ROWS, known.kinds, known.before_bytes, known.after_bytes, layers)


@pytest.mark.parametrize("choice", CHOICES)
def test_no_choice_takes_more_than_its_bound(choice: str) -> None:
    known = costs(6, kinds=KINDS)
    bound = at_worst({"text": first_seen(known)})["text"]
    for at in range(6):
        choices = ("all",) * at + (choice,) + ("all",) * (5 - at)
        assert known.peak_bytes(choices) <= bound.peak_bytes(choices)
    assert bound.layers["full"].keys() == set(CHOICES)
    fixed = StageCosts(ROWS, ("only",), 0.0, 0.0, {"only": {"mlp": known.layers["full"]["mlp"]}})
    assert at_worst({"text": fixed})["text"] == fixed  # of what was never recomputed whole nothing follows


@pytest.mark.parametrize(
    ("room_mib", "steps"),
    [(200, 1), (70, 2), (48, 4), (35, 4), (34, 1), (20, 1)],  # 35: of which one layer keeps all
)
def test_what_would_not_fit_is_never_tried(room_mib: int, steps: int) -> None:
    """The fewer fit at a time, the more steps; where not even one layer fits, its choices stay unknown."""
    real = {"text": costs(8)}
    bounds = at_worst({"text": first_seen(real["text"])})
    everything = {"text": ("all",) * 8}

    def fits(plan: dict[str, tuple[str, ...]]) -> bool:
        return predicted_bytes(bounds, plan, IN_TURNS) <= room_mib * MIB

    plans, untried = probes({"text": real["text"].kinds}, everything, fits)
    kept = {choice for plan in plans for choice in plan["text"]}
    assert (len(plans), kept | {choice for _, choice in untried}) == (steps, set(CHOICES))
    assert kept.isdisjoint(choice for _, choice in untried)
    for plan in plans:
        assert "offload" in kept
        tried = set(plan["text"]) - {"all", "offload"}
        assert not tried or predicted_bytes(real, plan, IN_TURNS) <= room_mib * MIB
    assert bool(untried) == (room_mib < 35)


def test_stages_on_one_device_share_what_there_is() -> None:
    real = {"vision": costs(6), "text": costs(6)}
    bounds = at_worst({stage: first_seen(known) for stage, known in real.items()})
    everything = {stage: ("all",) * 6 for stage in real}
    apart = arrangement(shared=False, outstanding=1, together=True)
    found = {}
    for name, arranged in {"apart": apart, "shared": arrangement(True, 1, together=True)}.items():
        most = predicted_bytes(bounds, everything, arranged) + 24 * MIB
        plans, untried = probes(
            {stage: known.kinds for stage, known in real.items()},
            everything,
            lambda plan, most=most, arranged=arranged: predicted_bytes(bounds, plan, arranged) <= most,
        )
        found[name] = len(plans)
        assert not untried
    assert found["apart"] < found["shared"]
