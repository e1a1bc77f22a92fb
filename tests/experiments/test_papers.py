"""experiments/PAPERS.md: every id once, everything that it names exists, its count and its figures are right."""

import re
import shlex
from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec

import pytest

from dhp.cli.completion import COMMANDS, FLAGS, KEYS, subcommands
from dhp.config.devices import shipped_directory
from dhp.config.keys import schema_keys
from experiments.figures import layouts
from tests.helpers.experiments import accepts, folders
from tests.helpers.figures import ROOT, Sentences, fixed, missing, one, rows, short, span

PAGE = "experiments/PAPERS.md"
TEXT = (ROOT / PAGE).read_text(encoding="utf-8")
IDS = {f"{letter}{number}" for letter, most in zip("ABCDE", (40, 52, 9, 44, 7)) for number in range(1, most + 1)}
WHY_NOT = {"A14", "A24", "A25", "A38", "B35", "D9", "D33", "D37", "D39", "D44"}
InRow = Callable[[str, str], tuple[str, str]]
PARTS = ("vision", "text")
# Of papers' tables, preprocessing of which `experiments.balance` has rows.
BY_WAY = {
    "B42": [f"InternVL, at most {most} tiles" for most in (1, 4, 6, 12)],
    "B44": [f"InternVL, tiles of {side}" for side in (224, 336, 448)],
    "B46": ["LLaVA-1.6"],
    "B47": ["Qwen2-VL"],
}
STATES = ("there", "partly", "why not")
FOLDERS = ("configs/", "docs/", "examples/", "experiments/", "results/", "scripts/", "tests/")


def table() -> dict[str, tuple[str, str, str, str]]:
    """By id: what the paper has, what is here, its result, its state."""
    found = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in TEXT.splitlines() if line[:2] == "| "]
    lines = [cells for cells in found if re.fullmatch(r"[A-E]\d+", cells[0])]
    assert all(len(cells) == 5 for cells in lines), [cells[0] for cells in lines if len(cells) != 5]
    assert len({cells[0] for cells in lines}) == len(lines)
    return {cells[0]: (cells[1], cells[2], cells[3], cells[4]) for cells in lines}


def named(cells: str) -> list[str]:
    """The spans of code in some text."""
    return re.findall(r"`([^`]+)`", cells)


def exists(span: str) -> bool:
    """Whether a module, a command, a file, a test in it or a key is there."""
    words = shlex.split(span)
    if words[:2] == ["python", "-m"]:
        return find_spec(words[2]) is not None
    if words[0] == "dhp":
        return words[1] in COMMANDS and runs(words[1], words[2:])
    if span.startswith(FOLDERS) or span in ("requirements.txt", "CITATION.cff"):
        file, _, test = span.partition("::")
        return (ROOT / file).exists() and (not test or f"def {test}(" in (ROOT / file).read_text(encoding="utf-8"))
    return span in schema_keys()


def runs(command: str, words: list[str]) -> bool:
    """Whether a command takes these words: a use of it, its flags, its keys, a configuration that is shipped."""
    if subcommands(command):
        command, words = f"{command} {words[0]}", words[1:]
    flags = {flag.rstrip("=") for flag in FLAGS.get(command, ())}
    keys = {*KEYS.get(command, ()), *schema_keys()}
    config = next((word.partition("=")[2] for word in words if word.startswith("--config-name=")), "tiny")
    given = [word.partition("=")[0] for word in words]
    named = {word for word in given if word.startswith("--")} <= flags
    set_ = {word.partition("=")[0] for word in words if "=" in word and word[:2] != "--"} <= keys
    return command in FLAGS and named and set_ and (shipped_directory() / f"{config}.yaml").exists()


def test_every_id_is_there_once() -> None:
    assert set(table()) == IDS and len(IDS) == 152


def test_the_count_is_that_of_the_table() -> None:
    counted = Counter(state for *_, state in table().values())
    assert set(counted) == set(STATES)
    there, partly, why = (counted[state] for state in STATES)
    assert f"Of 152 ids, {there} have a command and a result here, {partly} partly, and {why} say why not" in TEXT


def test_why_not_is_said_of_ten_ids_alone() -> None:
    found = table()
    assert {number for number, (*_, state) in found.items() if state == "why not"} == WHY_NOT
    for number, (_, _, result, state) in found.items():
        assert result.startswith("why not: ") == (state == "why not"), number


@pytest.mark.parametrize("number", sorted(IDS, key=lambda one: (one[0], int(one[1:]))))
def test_what_is_named_exists(number: str) -> None:
    _, here, result, state = table()[number]
    assert [span for span in named(here) if not exists(span)] == []
    assert state in ("missing", "why not") or number == "C8" or named(here), "neither command nor key nor test"
    assert result


@pytest.mark.parametrize("span", [
    "python -m experiments.no_such", "dhp exprot", "dhp inspect nothing", "data.balanse", "dhp plan devises=8",
    "dhp report --pngs", "dhp train --config-name=tini",
])  # fmt: skip
def test_what_does_not_exist_is_noticed(span: str) -> None:
    assert not exists(span)


def test_a_test_that_is_not_there_is_noticed() -> None:
    assert exists("tests/test_docs.py") and not exists("tests/test_docs.py::test_nothing")


@pytest.mark.parametrize("name", sorted(folders()))
def test_commands_of_experiments_are_accepted_by_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = {span for _, here, *_ in table().values() for span in named(here)}
    mine = [shlex.split(line)[3:] for line in lines if line.split()[:3] == ["python", "-m", f"experiments.{name}"]]
    assert [arguments for arguments in mine if not accepts(monkeypatch, name, arguments)] == []


def figures() -> Sentences:
    """What the page has of rows."""
    of = {number: row[2] for number, row in table().items()}

    def in_row(number: str, words: str) -> tuple[str, str]:
        assert words in of[number], f"{number}: {words}"
        return PAGE, words

    yield from simulated(in_row)
    yield from of_balance(in_row)
    yield from of_layouts(in_row)
    yield from of_long_rows(in_row)


def simulated(in_row: InRow) -> Sentences:
    cells = {row["row"]: row for row in rows("published", group="18 cells")}
    nine = [f"{cells[f'{way} 9k']['predicted']:,.0f}" for way in ("ZeRO-3", "SP+TP", "TP")]
    yield in_row("A22", f"ZeRO-3 {nine[0]}, SP+TP {nine[1]}, TP {nine[2]} patches/s")
    yield in_row("A16", f"{cells['SP+TP 65k']['predicted']:,.0f} patches/s by SP+TP")
    score = one("published", score="18 cells")
    yield in_row("A18", f"{score['median']:.1%} off in the median over {score['held_out']} held-out cells")
    ratios = layouts("TP", "SP+TP", False)(rows("layouts"))
    yield in_row("A18", f"TP takes {span(ratios)} × SP+TP's step")
    yield in_row("A19", f"right in {score['batches_right']} of {score['cells']} cells, the 3 out of memory among them")
    assert sum(row["predicted"] == "OOM" for row in cells.values()) == 3
    days = {row["row"]: f"{row['predicted']:.1f}" for row in rows("published", group="chain of rows")}
    chain = ("baseline", "data balanced", "data and model balanced", "data, model and memory balanced")
    yield in_row("B38", f"days {', '.join(days[row] for row in chain)} simulated")
    cuts = [days[f"data balanced, cut by {rule}"] for rule in ("parameters", "layers", "profile")]
    yield in_row("B25", f"days {', '.join(cuts)}, {days[chain[2]]} simulated")
    yield in_row("B39", f"chain of rows {one('published', score='chain of rows')['median']:.1%} off in the median")
    gains = [f"{row['predicted']:.2f}" for row in rows("published", group="ratios")][:4]
    yield in_row("B49", f"gains of {', '.join(gains)} ×")
    hardware = one("published", score="hardware")
    yield in_row("B48", f"four rows, {hardware['median']:.1%} off in the median, {hardware['max']:.1%} at most")
    yield in_row("B41", f"days of seven {one('published', score='other models')['median']:.0%} off in the median")
    for number, name in (("D9", "Megatron CP+TP"), ("D11", "sequence parallel"), ("D13", "with ZeRO-3")):
        yield in_row(number, f"{one('published', score=name)['median']:.1%} off in the median")
    assert all(row["predicted"] == "fits" for row in rows("published", group="longest"))


def of_balance(in_row: InRow) -> Sentences:
    of = {row["method"]: row for row in rows("balance", source="made 1.2M", dp=8)}
    dist = {name: [short(row[f"dist_{part}"], 3) for part in ("vision", "text")] for name, row in of.items()}
    yield in_row("B2", f"of ISF at DP 8 {dist['isf'][0]} vision, {dist['isf'][1]} text")
    yield in_row("B5", f"Pad {of['isf']['pad']:.0f}, {of['isf']['samples_a_pack']} samples a pack")
    yield in_row("B8", f"none dropped, of {of['isf']['samples']:,}")
    assert not any(row["dropped"] for row in of.values())
    yield in_row("B12", f"in {of['isf']['seconds']:.1f} s by ISF, {of['balanced']['seconds']:.1f} s by `balanced`")
    random = of["random"]
    pad = short(random["pad"], 2)
    yield in_row("B13", f"Pad {pad}, Dist {short(random['dist_vision'], 2)} and {short(random['dist_text'], 2)}")
    yield in_row("B14", f"Dist {'/'.join(dist['length_group'])} and {'/'.join(dist['device_group'])}")
    filters = {(row["full_vision"], row["full_text"]): row for row in rows("balance_sweeps", sweep="filters")}
    both = {key: "/".join(short(row[f"dist_{part}"], 3) for part in ("vision", "text")) for key, row in filters.items()}
    yield in_row(
        "B37", f"{both[9, 4032]}, {both[9, 3968]}, {both[9, 3840]} (vision/text); at a tile less {both[8, 3968]}"
    )
    passes = rows("balance_sweeps", sweep="passes")
    lines = [", ".join(short(row[f"dist_{part}"], 3) for row in passes) for part in ("vision", "text")]
    yield in_row("B45", f"{', '.join(str(row['passes']) for row in passes)} passes: vision {lines[0]}, text {lines[1]}")
    for way, named in {
        "InternVL, at most 12 tiles": "text with 12 tiles",
        "InternVL, tiles of 224": "tiles of 224",
    }.items():
        swept = rows("balance_preprocessing", preprocessing=way, sweep="passes")
        yield in_row("B45", f"{named} {', '.join(short(row['dist_text'], 3) for row in swept)}")
    for number, ways in BY_WAY.items():
        for method in ("isf", "balanced"):
            found = [one("balance_preprocessing", preprocessing=way, method=method) for way in ways]
            yield in_row(number, ", ".join("/".join(short(row[f"dist_{part}"], 3) for part in PARTS) for row in found))
        for method in ("random", "isf", "balanced"):
            found = [one("balance_preprocessing", preprocessing=way, method=method) for way in ways]
            yield in_row(number, ", ".join(fixed(row["time_to_even"]) for row in found))
    named = {"random": "random", "length_group": "length groups", "device_group": "device groups", "isf": "ISF"}
    times = {
        name: one("balance", source="made 1.2M", dp=8, method=name)["time_to_even"] for name in (*named, "balanced")
    }
    words = [f"{word} {times[name]:.2f}" for name, word in named.items()]
    yield in_row("B15", f"{', '.join(words)}, `balanced` {times['balanced']:.2f}")
    isf, balanced = (one("convergence", summary=name) for name in ("isf", "balanced"))
    below = f"ISF {short(-isf['difference'], 2)}, of `balanced` {short(-balanced['difference'], 2)}"
    yield in_row("B51", f"{below} below random batches', three seeds whose deviation is ")
    yield in_row("B51", short(one("convergence", summary="random")["heldout_sd"], 3))
    assert one("convergence", summary="sequence")["differences"] == [0.0, 0.0, 0.0]
    off = {row["layout"]: f"{row['off']:.1e}" for row in rows("sight", what="layout")}
    yield in_row("D41", f"two {off['text-seq2']} off one actor's, the tower by Ulysses and the decoder by tensor")
    yield in_row("D41", f"tensor {off['seq2-tp2']}")
    found = {(row["trained_on"], row["frames"]): f"{row['found']:.0%}" for row in rows("needle_frames")}
    yield in_row("D36", f"up to 8 frames {found['short', 512]}, by one of up to 64 {found['long', 512]}")
    yield in_row(
        "D40", f"{found['short', 128]} to 128 frames, {found['short', 256]} at 256, {found['short', 512]} at 512"
    )
    apart, together = (
        one("long_context", question="sampler", way=f"balanced{way}") for way in (", long ones apart", "")
    )
    yield in_row("C5", f"{short(apart['dist_flops'], 3)}, together {short(together['dist_flops'], 3)}")
    yield in_row("C6", f"{short(together['sp_ratio_step'], 3)} together, {apart['sp_ratio_step']:.0f} apart")
    of_sets = [rows("long_context", question="long_sets", set=name) for name in ("long", "mixed")]
    long, mixed = ({row["way"]: row for row in of_set} for of_set in of_sets)
    ratios = long["random"]["sp_ratio_by_token"], long["balanced"]["sp_ratio"]
    yield in_row("C6", f"with their tokens {short(ratios[0], 2)}, shared out first {short(ratios[1], 3)}")
    before, after = mixed["random"], mixed["balanced"]
    dists = [f"{short(row['dist_vision'], 2)}/{short(row['dist_text'], 2)}" for row in (before, after)]
    yield in_row("C7", f"{before['ave_bs']:g} → {after['ave_bs']:g} samples, Pad {short(before['pad'], 3)} → 0")
    yield in_row("C7", f"Dist {' → '.join(dists)}")
    busy = {
        way: [f"{row['busy_share']:.0%}" for row in rows("long_context", question="schedule", way=way)]
        for way in ("transformers, layers over the ranks", "dhp, ulysses 2", "dhp, ring 2")
    }
    first, second = busy.pop("transformers, layers over the ranks")
    (both,) = {share for of_way in busy.values() for share in of_way}
    yield in_row("D21", f"{first} and {second} of the time to the first token, ranks that share the prompt for {both}")
    yield in_row("C4", f"{short(together['sp_ratio_auto'], 2)} of tokens divided without need")


def of_layouts(in_row: InRow) -> Sentences:
    free = [row["ours"] for row in rows("partition", question="free memory", column="free GB")]
    yield in_row("B34", f"first row: {', '.join(map(str, free))} GB free")
    by = {row["method"]: row for row in rows("partition", question="replay", stages=4, frozen="nothing")}
    for number, method in (("B22", "parameters"), ("B23", "layers")):
        yield in_row(number, f"{by[method]['to_exact']:.2f} × the exact cut's step")
    yield in_row("B24", f"{one('partition', question='variances', method='profile', column='step')['ours']:.2f} ×")
    agree = [row["agrees"] for row in rows("partition", question="stages")]
    yield in_row("B41", f"cuts of {sum(agree)} of {len(agree)} within 3 layers")
    sums = {row["method"]: row for row in rows("partition", question="variances", column="SUM(comm)")}
    yield in_row("B20", f"SUM(comm) of `layers` {sums['layers']['ours']:.1f} MiB")
    whole, chosen = rows("recompute", mode="speed")
    yield in_row(
        "B30", f"{chosen['auto_vs_full']:.2f} × as fast as recomputing everything, of {chosen['none_vs_full']:.2f}"
    )
    yield in_row("B33", f"{chosen['auto_vs_full']:.2f} × against {whole['auto_vs_full']:.2f} ×")
    projector = one("finetuning", question="frozen", train="projector")
    yield in_row("B43", f"the projector alone {projector['speed_ratio']:.2f} ×")
    sparse, dense = (one("driver_scale", ranks=64, routes=name)["step_s"] for name in ("sparse", "dense"))
    yield in_row("A11", f"a step with sparse routes {sparse / dense:.2f} × the dense one's time")
    handoff = one("micro", question="handoff", transport="shared_memory", megabytes=64)
    yield in_row("A11", f"{handoff['ratio']:.1f} × one copy")
    step, regret = one("plan_accuracy", score="step"), one("plan_accuracy", score="regret")
    yield in_row("E6", f"{step['rows']} layouts {step['median']:.0%} off in the median")
    yield in_row("E6", f"{regret['mean']:.1%} slower than the fastest in the mean")


def of_long_rows(in_row: InRow) -> Sentences:
    def longest(layout: str, counted: str = "device") -> float:
        return one("longest_sequence", layout=layout, ranks=4, counted=counted, recompute="none")["ratio_to_one_rank"]

    yield in_row("A3", f"images {longest('SP+TP', 'vision'):.0f} × as long on 4 ranks")
    yield in_row("A21", f"SP+TP {longest('SP+TP'):.1f} × one rank's image, ZeRO-3 {longest('ZeRO-3'):.0f} ×")
    two = one("two_hosts", kv_ratio=1.0, direction="both", **{"2d_over_2d": 1.0})
    yield in_row("D4", f"{two['ring_over_2d']:.1f} × as fast as a ring, {two['ulysses_over_2d']:.2f} × as Ulysses")
    yield in_row("D10", f"gathered at once takes {two['2d_gather_over_2d']:.2f} × 2D's time")
    ends, order = (
        one("long_context", question="steps", tokens=131072, way=way)["seconds"]
        for way in ("ring 4", "ring 4, each the next part")
    )
    yield in_row("D3", f"{ends:.0f} s, by pieces in order {order:.0f} s")
    ring, ulysses = (
        one("long_context", question="longest", way=f"offload, mlp_chunks 16, {way} 4")["to_one_rank"]
        for way in ("ring", "ulysses")
    )
    yield in_row("D14", f"{ring:.2f} × (ring) and {ulysses:.2f} × (Ulysses)")
    answers = rows("long_context", question="inference", ranks=2)
    layers = [row["first_token_speed_to_plain"] for row in answers if "layers over" in row["way"]]
    ours = [row["first_token_speed_to_plain"] for row in answers if row["way"].startswith("dhp")]
    yield in_row("D19", f"two ranks {span(ours, 1)} × as fast as one process, split by layers {span(layers)} ×")
    assert {row["same_tokens"] for row in rows("long_context", question="inference")} == {33}
    whole = one("long_context", question="two_stages", way="all rows")["one_to_two"]
    yield in_row("D22", f"two ranks: {whole['one stage, by pictures']:.2f} ×")
    yield in_row("C3", f"{whole['one stage, by tokens']:.2f} × as fast")
    peaks = [f"{row['peak_mb']:,.0f}" for row in rows("long_context", question="video")]
    yield in_row("D30", f"{peaks[-1]} MB in a process of four, {peaks[0]} decoded whole")


def test_figures_are_those_of_the_rows() -> None:
    assert missing(figures()) == []
