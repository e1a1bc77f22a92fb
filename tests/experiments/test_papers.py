"""experiments/PAPERS.md: every id once, everything that it names exists, its count and its figures are right."""

import re
import shlex
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
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
InRow = Callable[[str, str, str], tuple[str, str]]
PARTS = ("vision", "text")
PARTS_S = (("tower_s", 2), ("decoder_s", 1))  # of simulated cells, with the digits that the page has
# Of papers' tables, preprocessing of which `experiments.balance` has rows.
BY_WAY = {
    "B42": [f"InternVL, at most {most} tiles" for most in (1, 4, 6, 12)],
    "B44": [f"InternVL, tiles of {side}" for side in (224, 336, 448)],
    "B46": ["LLaVA-1.6"],
    "B47": ["Qwen2-VL"],
}
STATES = ("agrees", "differs", "partly", "missing", "not possible here")
AGREES = 0.1  # the largest difference of figures that agree
# Tables and figures of which the papers print no number that could stand here: drawings, formulae, recipes.
WITHOUT_NUMBERS = {"A17", "A21", "B4", "B50", "C9", "D3", "D14", "D21", "D23", "D32", "D35", "D36", "D40", "D41", "D42"}
FOLDERS = ("configs/", "docs/", "examples/", "experiments/", "results/", "scripts/", "tests/")


@dataclass(frozen=True)
class Row:
    paper: str
    published: str
    here: str
    agrees: str
    command: str
    state: str

    @property
    def pairs(self) -> list[tuple[float, float]]:
        """Published figures and ours, where there are any to compare."""
        found = numbers(self.published), numbers(self.here)
        return list(zip(*found, strict=True)) if found[0] else []

    @property
    def difference(self) -> str:
        if not self.pairs:
            return "–"
        most = max(abs(ours / published - 1) if published else abs(ours) for published, ours in self.pairs)
        return f"within {most:.1%}" if most < 1 else f"within {most + 1:.1f} ×"

    def refused(self, number: str) -> str:
        """Why the row may not have its state; "": it may."""
        if self.agrees != self.difference:
            return f"differs by {self.difference}"
        if self.state != "agrees":
            return "" if self.state != "differs" or self.pairs else "differs from nothing"
        for published, ours in self.pairs:
            if "×" in self.published and (published - 1) * (ours - 1) < 0:
                return "opposite"
            if abs(ours - published) > AGREES * (abs(published) or 1):
                return "too far off"
        if not self.pairs and re.search(r"\b(table|figure)\b", self.paper) and number not in WITHOUT_NUMBERS:
            return "no published figure"
        return ""


_NUMBER = re.compile(r"(?<![\w.−-])[+−-]?(?:\d[\d,]*\.?\d*|\.\d+)(?!\w)")


def numbers(cell: str) -> list[float]:
    """Figures up to the first semicolon, behind the last colon before it; none of a cell in brackets."""
    first = "" if cell.startswith("(") else cell.partition(";")[0].rpartition(": ")[2]
    return [float(one.replace(",", "").replace("−", "-")) for one in _NUMBER.findall(first)]


def table() -> dict[str, Row]:
    """By id."""
    found = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in TEXT.splitlines() if line[:2] == "| "]
    lines = [cells for cells in found if re.fullmatch(r"[A-E]\d+", cells[0])]
    assert all(len(cells) == 7 for cells in lines), [cells[0] for cells in lines if len(cells) != 7]
    assert len({cells[0] for cells in lines}) == len(lines)
    return {cells[0]: Row(*cells[1:]) for cells in lines}


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
    counted = Counter(row.state for row in table().values())
    assert set(counted) <= set(STATES)
    agree, differ, partly, missing_, not_possible = (counted[state] for state in STATES)
    words = f"Of 152 ids, {agree} agree, {differ} differ, {partly} are here partly, {missing_} are missing and "
    assert f"{words}{not_possible} " in TEXT


@pytest.mark.parametrize("number", sorted(IDS, key=lambda one: (one[0], int(one[1:]))))
def test_a_state_is_that_of_its_figures(number: str) -> None:
    row = table()[number]
    assert row.refused(number) == ""
    assert [span for span in named(row.command) if not exists(span)] == []
    assert row.state in STATES[3:] or number == "C8" or named(row.command), "neither command nor key nor test"
    assert row.here


def test_sentences_beside_the_tables_are_answered() -> None:
    lines = [line.strip("|").split(" | ") for line in TEXT.splitlines() if re.match(r"\| \d+ \|", line)]
    assert [int(cells[0]) for cells in lines] == list(range(1, 25)) and {len(cells) for cells in lines} == {3}
    known = [span for cells in lines for span in named(cells[2]) if not span.endswith("_s")]
    assert [span for span in known if not exists(span)] == []
    assert {number for cells in lines for number in re.findall(r"\b[A-E]\d+\b", cells[2])} <= IDS


def sentences() -> Sentences:
    parts = [row for row in rows("published", group="18 cells") if row["row"] in ("SP+TP 4k", "SP+TP 16k")]
    words = [f"{parts[0][part]:.{digits}f} to {parts[1][part]:.{digits}f} s" for part, digits in PARTS_S]
    yield PAGE, f"{words[0]}, and {words[1]}"
    stages = {row["stage"]: row for row in rows("imbalance", row="over time", way="random batches")}
    kept = [f"{stages[at]['activation_mib'] / stages[at]['tokens']:.2f}" for at in (1, 3)]
    yield PAGE, f"{kept[0]} MiB of activations a token of the tower's first stage, {kept[1]} of the decoder's first"
    days = {row["row"]: row["predicted"] for row in rows("published", group="chain of rows")}
    gains = days["model balanced alone"] - days["data and model balanced"], days["baseline"] - days["data balanced"]
    yield PAGE, f"{gains[0]:.1f} and {gains[1]:.1f}, simulated"
    steps = {row["row"]: row for row in rows("published") if "row" in row}
    megatron = [row for name, row in steps.items() if row.get("group") == "Megatron CP+TP"]
    beside = [steps["2D," + row["row"].partition(",")[2]] for row in megatron]
    spans = [span([a[of] / b[of] for a, b in zip(megatron, beside, strict=True)]) for of in ("predicted", "published")]
    yield PAGE, f"{spans[0]} ×, published {spans[1]} × over {('seven', 'eight', 'nine')[len(megatron) - 7]} lengths"


def test_what_does_not_agree_is_refused() -> None:
    row = Row("table 4: cut by profile", "1.07 ×", "1.05 ×; replayed", "within 1.9%", "", "agrees")
    assert row.refused("B24") == ""
    assert replace(row, here="0.97 ×; replayed", agrees="within 9.3%").refused("B24") == "opposite"
    assert replace(row, here="1.27 ×; replayed", agrees="within 18.7%").refused("B24") == "too far off"
    assert replace(row, here="1.27 ×; replayed").refused("B24") == "differs by within 18.7%"
    assert replace(row, published="–", agrees="–").refused("B24") == "no published figure"
    assert replace(row, published="–", agrees="–", state="differs").refused("B24") == "differs from nothing"
    with pytest.raises(ValueError, match=r"zip\(\)"):
        _ = replace(row, here="1.05, 1.06 ×; replayed").pairs


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
    lines = {span for row in table().values() for span in named(row.command)}
    mine = [shlex.split(line)[3:] for line in lines if line.split()[:3] == ["python", "-m", f"experiments.{name}"]]
    assert [arguments for arguments in mine if not accepts(monkeypatch, name, arguments)] == []


def figures() -> Sentences:
    """What the page has of rows."""
    of = table()

    def in_row(number: str, experiment: str, words: str) -> tuple[str, str]:
        assert words in of[number].here, f"{number}: {words}"
        assert f"python -m experiments.{experiment}" in of[number].command, f"{number}: not made by that"
        return PAGE, words

    yield from compared(in_row)
    yield from sentences()
    yield from simulated(in_row)
    yield from of_balance(in_row)
    yield from of_layouts(in_row)
    yield from of_long_rows(in_row)


def compared(in_row: InRow) -> Sentences:
    """The figures that stand beside published ones, as the rows have them."""
    for number, (experiment, values) in ours().items():
        yield in_row(number, experiment, values)


def ours() -> dict[str, tuple[str, str]]:
    """By id, the experiment and the figures that it made."""
    simulated = {row["row"]: row["predicted"] for row in rows("published") if "row" in row}
    decoder = {name: "InternViT-6B + " + name for name in ("InternLM2-20B", "Llama3-70B")}
    lengths, layouts_ = ("1k", "4k", "9k", "16k", "25k", "65k"), ("SP+TP", "TP", "ZeRO-3")
    cells = [simulated[f"{layout} {length}"] for layout in layouts_ for length in lengths]
    ratios = [simulated[f"SP+TP {length}"] / simulated[f"TP {length}"] for length in lengths]
    batches = {row["row"]: row["predicted_batch"] for row in rows("published", group="18 cells")}
    of_paper = [str(batches[f"{layout} {n}"]) for layout in layouts_ for n in lengths if batches[f"{layout} {n}"]]
    chain = ("baseline", "data balanced", "data and model balanced", "data, model and memory balanced")
    cuts = [f"data balanced, cut by {rule}" for rule in ("parameters", "layers", "profile")]
    zero = [f"ZeRO-3, {decoder['InternLM2-20B']}, {kind}" for kind in ("baseline", "data balanced")]
    hardware = [row["row"] for row in rows("published", group="hardware")]
    gpus = [
        f"{kind}, {decoder['Llama3-70B']}, {n} H100" for n in (64, 128, 256, 512) for kind in ("baseline", "balanced")
    ]

    def days(*names: str) -> str:
        return ", ".join(f"{simulated[name]:.1f}" for name in names)

    def slower(devices: int, lengths: tuple[str, ...]) -> str:
        pairs = [[simulated[f"{way}, {devices} devices, {n}"] for way in ("ring", "2D")] for n in lengths]
        return ", ".join(f"{ring / other:.1f}" for ring, other in pairs)

    return {
        "A16": ("published", f"{simulated['SP+TP 65k']:,.0f}; simulated"),
        "A18": ("published", ", ".join(f"{cell:,.0f}" for cell in cells if cell != "OOM")),
        "A19": ("published", ", ".join(of_paper)),
        "A20": ("published", f"{span(ratios)} ×; simulated"),
        "A22": ("published", ", ".join(f"{simulated[f'{way} 9k']:,.0f}" for way in ("ZeRO-3", "SP+TP", "TP"))),
        "B25": ("published", days(*cuts, chain[2])),
        "B35": ("published", days(*zero, chain[0], chain[3])),
        "B36": ("published", days(*zero)),
        "B38": ("published", days(*chain)),
        "B41": ("published", days(*(row["row"] for row in rows("published", group="other models")))),
        "B48": ("published", days(*hardware)),
        "B49": ("published", days(*gpus)),
        "D11": ("published", f"{slower(32, ('32k', '320k'))} ×; simulated"),
        "D12": ("published", f"{slower(64, ('32k', '578k'))} ×; simulated"),
        **of_packs(),
        **of_cuts(),
    }


def of_packs() -> dict[str, tuple[str, str]]:
    of = {row["method"]: row for row in rows("balance", source="made 1.2M", dp=8)}

    def dist(row: dict) -> str:
        return "/".join(short(row[f"dist_{part}"], 3) for part in PARTS)

    def three(method: str) -> str:
        return ", ".join(short(of[method][key], 2) for key in ("pad", "dist_vision", "dist_text"))

    filters = {(row["full_vision"], row["full_text"]): dist(row) for row in rows("balance_sweeps", sweep="filters")}
    mixed = one("long_context", question="long_sets", set="mixed", way="balanced")
    apart = one("long_context", question="long_sets", set="long", way="random")["sp_ratio_by_token"]
    first = one("long_context", question="long_sets", set="long", way="balanced")["sp_ratio"]
    figures_ = [f"{mixed['ave_bs']:g}", *(short(mixed[f"dist_{part}"], 2) for part in PARTS)]
    by_way = {
        number: (
            "balance",
            ", ".join(dist(one("balance_preprocessing", preprocessing=way, method="isf")) for way in ways),
        )
        for number, ways in BY_WAY.items()
    }
    return {
        "B5": ("balance", f"{of['isf']['samples_a_pack']}, {of['isf']['pad']:.0f}"),
        "B13": ("balance", three("random")),
        "B14": ("balance", f"{three('length_group')}, {three('device_group')}"),
        "B37": ("balance", ", ".join(filters[key] for key in ((9, 4032), (9, 3968), (9, 3840), (8, 3968)))),
        "C6": ("long_context", f"{short(apart, 2)}, {short(first, 3)}; pictures among the ranks"),
        "C7": ("long_context", ", ".join(figures_)),
        **by_way,
    }


def of_cuts() -> dict[str, tuple[str, str]]:
    by = {row["method"]: row for row in rows("partition", question="replay", stages=4, frozen="nothing")}
    free = [str(row["ours"]) for row in rows("partition", question="free memory", column="free GB")]
    sums = {row["method"]: row["ours"] for row in rows("partition", question="variances", column="SUM(comm)")}
    profile = one("partition", question="variances", method="profile", column="step")["ours"]
    spread = {row["way"]: row["forward_ms_spread"] for row in rows("imbalance", row="between stages")}
    time = {(row["way"], row["stage"]): row["forward_ms_spread"] for row in rows("imbalance", row="over time")}
    return {
        "B3": ("imbalance", f"{spread['random batches']:.2f}, {time['random batches', 1]:.2f}; balanced"),
        "B20": ("partition", f"{sums['layers']:+.1f}, {sums['bmp']:+.1f}".replace("-", "−")),
        "B22": ("partition", f"{by['parameters']['to_exact']:.2f} ×; replayed"),
        "B23": ("partition", f"{by['layers']['to_exact']:.2f} ×; replayed"),
        "B24": ("partition", f"{profile:.2f} ×; by our costs"),
        "B34": ("partition", ", ".join(free)),
    }


def simulated(in_row: InRow) -> Sentences:
    cells = {row["row"]: row for row in rows("published", group="18 cells")}
    of_cells = one("published", score="18 cells")
    words = f"right in {of_cells['batches_right']} of {of_cells['cells']} cells, the 3 out of memory among them"
    yield in_row("A19", "published", words)
    assert sum(row["predicted"] == "OOM" for row in cells.values()) == 3
    tp = [row["error"] for name, row in cells.items() if name.startswith("TP")]
    assert {round(100 * min(tp)), round(100 * max(tp))} == {3, 12}  # as A18 says
    ratios = layouts("TP", "SP+TP", False)(rows("layouts"))
    yield in_row("A18", "layouts", f"TP takes {span(ratios)} × SP+TP's step")
    chain = one("published", score="chain of rows")
    words = f"chain of rows {chain['median']:.1%} off in the median, {chain['max']:.1%} at most"
    yield in_row("B39", "published", words)
    for number, name, words in (
        ("D9", "Megatron CP+TP", "CP+TP {} off in the median"),
        ("D9", "Megatron CP", "CP {} with one cell fitted"),
        ("D11", "sequence parallel", "Ulysses and 2D {} off in the median"),
        ("D13", "with ZeRO-3", "14 rows {} off in the median"),
    ):
        yield in_row(number, "published", words.format(f"{one('published', score=name)['median']:.1%}"))


def of_balance(in_row: InRow) -> Sentences:
    of = {row["method"]: row for row in rows("balance", source="made 1.2M", dp=8)}
    dist = {name: [short(row[f"dist_{part}"], 3) for part in ("vision", "text")] for name, row in of.items()}
    yield in_row("B2", "balance", f"of ISF at DP 8 {dist['isf'][0]} vision, {dist['isf'][1]} text")
    yield in_row("B8", "balance", f"none dropped, of {of['isf']['samples']:,}")
    assert not any(row["dropped"] for row in of.values())
    yield in_row(
        "B12", "balance", f"in {of['isf']['seconds']:.1f} s by ISF, {of['balanced']['seconds']:.1f} s by `balanced`"
    )
    assert short(of["random"]["pad"], 2) == ".34"  # as B1 says
    passes = rows("balance_sweeps", sweep="passes", source="made 1.2M")
    lines = [", ".join(short(row[f"dist_{part}"], 3) for row in passes) for part in ("vision", "text")]
    yield in_row(
        "B45",
        "balance",
        f"{', '.join(str(row['passes']) for row in passes)} passes: vision {lines[0]}, text {lines[1]}",
    )
    for name in ("ai2d", "chartqa"):
        of_set = rows("balance_sweeps", sweep="passes", source=name)
        yield in_row("B45", "balance", f"of {name} {', '.join(short(row['dist_vision'], 3) for row in of_set)}")
    for way, named in {
        "InternVL, at most 12 tiles": "text with 12 tiles",
        "InternVL, tiles of 224": "tiles of 224",
    }.items():
        swept = rows("balance_preprocessing", preprocessing=way, sweep="passes")
        yield in_row("B45", "balance", f"{named} {', '.join(short(row['dist_text'], 3) for row in swept)}")
    for number, ways in BY_WAY.items():
        for method in ("random", "isf", "balanced"):
            found = [one("balance_preprocessing", preprocessing=way, method=method) for way in ways]
            yield in_row(number, "balance", ", ".join(fixed(row["time_to_even"]) for row in found))
    named = {"random": "random", "length_group": "length groups", "device_group": "device groups", "isf": "ISF"}
    times = {
        name: one("balance", source="made 1.2M", dp=8, method=name)["time_to_even"] for name in (*named, "balanced")
    }
    words = [f"{word} {times[name]:.2f}" for name, word in named.items()]
    yield in_row("B15", "balance", f"{', '.join(words)}, `balanced` {times['balanced']:.2f}")
    isf, balanced = (one("convergence", summary=name) for name in ("isf", "balanced"))
    below = f"ISF {short(-isf['difference'], 2)}, of `balanced` {short(-balanced['difference'], 2)}"
    yield in_row("B51", "convergence", f"{below} below random batches', three seeds whose deviation is ")
    yield in_row("B51", "convergence", short(one("convergence", summary="random")["heldout_sd"], 3))
    assert one("convergence", summary="sequence")["differences"] == [0.0, 0.0, 0.0]
    off = {row["layout"]: f"{row['off']:.1e}" for row in rows("sight", what="layout")}
    yield in_row(
        "D41", "sight", f"two {off['text-seq2']} off one actor's, the tower by Ulysses and the decoder by tensor"
    )
    yield in_row("D41", "sight", f"tensor {off['seq2-tp2']}")
    found = {(row["trained_on"], row["frames"]): f"{row['found']:.0%}" for row in rows("needle_frames")}
    yield in_row(
        "D36", "needle_frames", f"up to 8 frames {found['short', 512]}, by one of up to 64 {found['long', 512]}"
    )
    yield in_row(
        "D40",
        "needle_frames",
        f"{found['short', 128]} to 128 frames, {found['short', 256]} at 256, {found['short', 512]} at 512",
    )
    apart, together = (
        one("long_context", question="sampler", way=f"balanced{way}") for way in (", long ones apart", "")
    )
    yield in_row("C5", "long_context", f"{short(apart['dist_flops'], 3)}, together {short(together['dist_flops'], 3)}")
    yield in_row(
        "C6", "long_context", f"{short(together['sp_ratio_step'], 3)} together, {apart['sp_ratio_step']:.0f} apart"
    )
    before = one("long_context", question="long_sets", set="mixed", way="random")
    dist = f"Dist {short(before['dist_vision'], 2)}/{short(before['dist_text'], 2)}"
    yield in_row("C7", "long_context", f"random Pad {short(before['pad'], 3)}, {dist}")
    busy = {
        way: [f"{row['busy_share']:.0%}" for row in rows("long_context", question="schedule", way=way)]
        for way in ("transformers, layers over the ranks", "dhp, ulysses 2", "dhp, ring 2")
    }
    first, second = busy.pop("transformers, layers over the ranks")
    (both,) = {share for of_way in busy.values() for share in of_way}
    yield in_row(
        "D21",
        "long_context",
        f"{first} and {second} of the time to the first token, ranks that share the prompt for {both}",
    )
    yield in_row("C4", "long_context", f"{short(together['sp_ratio_auto'], 2)} of tokens divided without need")


def of_layouts(in_row: InRow) -> Sentences:
    agree = [row["agrees"] for row in rows("partition", question="stages")]
    yield in_row("B41", "partition", f"cuts of {sum(agree)} of {len(agree)} within 3 layers")
    whole, chosen = rows("recompute", mode="speed")
    yield in_row(
        "B30",
        "recompute",
        f"{chosen['auto_vs_full']:.2f} × as fast as recomputing everything, of {chosen['none_vs_full']:.2f}",
    )
    yield in_row("B33", "recompute", f"{chosen['auto_vs_full']:.2f} × against {whole['auto_vs_full']:.2f} ×")
    projector = one("finetuning", question="frozen", train="projector")
    yield in_row("B43", "finetuning", f"the projector alone {projector['speed_ratio']:.2f} ×")
    sparse, dense = (one("driver_scale", ranks=64, routes=name)["step_s"] for name in ("sparse", "dense"))
    yield in_row("A11", "driver_scale", f"a step with sparse routes {sparse / dense:.2f} × the dense one's time")
    handoff = one("micro", question="handoff", transport="shared_memory", megabytes=64)
    yield in_row("A11", "micro", f"{handoff['ratio']:.1f} × one copy")
    step, regret = one("plan_accuracy", score="step"), one("plan_accuracy", score="regret")
    yield in_row("E6", "plan_accuracy", f"{step['rows']} layouts {step['median']:.0%} off in the median")
    yield in_row("E6", "plan_accuracy", f"{regret['mean']:.1%} slower than the fastest in the mean")


def of_long_rows(in_row: InRow) -> Sentences:
    def longest(layout: str, counted: str = "device") -> float:
        return one("longest_sequence", layout=layout, ranks=4, counted=counted, recompute="none")["ratio_to_one_rank"]

    yield in_row("A3", "longest_sequence", f"images {longest('SP+TP', 'vision'):.0f} × as long on 4 ranks")
    yield in_row(
        "A21", "longest_sequence", f"SP+TP {longest('SP+TP'):.1f} × one rank's image, ZeRO-3 {longest('ZeRO-3'):.0f} ×"
    )
    two = one("two_hosts", kv_ratio=1.0, direction="both", **{"2d_over_2d": 1.0})
    yield in_row(
        "D4", "two_hosts", f"{two['ring_over_2d']:.1f} × as fast as a ring, {two['ulysses_over_2d']:.2f} × as Ulysses"
    )
    yield in_row("D10", "two_hosts", f"gathered at once takes {two['2d_gather_over_2d']:.2f} × 2D's time")
    ends, order = (
        one("long_context", question="steps", tokens=131072, way=way)["seconds"]
        for way in ("ring 4", "ring 4, each the next part")
    )
    yield in_row("D3", "long_context", f"{ends:.0f} s, by pieces in order {order:.0f} s")
    ring, ulysses = (
        one("long_context", question="longest", way=f"offload, mlp_chunks 16, {way} 4")["to_one_rank"]
        for way in ("ring", "ulysses")
    )
    yield in_row("D14", "long_context", f"{ring:.2f} × (ring) and {ulysses:.2f} × (Ulysses)")
    kept = {row["way"]: row["to_one_rank"] for row in rows("long_context", question="longest_kept")}
    ringed, both = (", ".join(f"{kept[f'none, ring {n}']:.2f}" for n in (2, 4, 8)), kept["none, ring 2 × ulysses 4"])
    yield in_row("D14", "long_context", f"{ringed} × (ring)")
    of_two = ", ".join(f"{kept[f'none, ulysses {n}']:.2f}" for n in (2, 4))
    yield in_row("D14", "long_context", f"{of_two} × (Ulysses), 8 ranks {both:.2f} × (2D)")
    answers = rows("long_context", question="inference", ranks=2)
    layers = [row["first_token_speed_to_plain"] for row in answers if "layers over" in row["way"]]
    ours = [row["first_token_speed_to_plain"] for row in answers if row["way"].startswith("dhp")]
    yield in_row(
        "D19", "long_context", f"two ranks {span(ours, 1)} × as fast as one process, split by layers {span(layers)} ×"
    )
    assert {row["same_tokens"] for row in rows("long_context", question="inference")} == {33}
    whole = one("long_context", question="two_stages", way="all rows")["one_to_two"]
    yield in_row("D22", "long_context", f"two ranks: {whole['one stage, by pictures']:.2f} ×")
    yield in_row("C3", "long_context", f"{whole['one stage, by tokens']:.2f} × as fast")
    peaks = [f"{row['peak_mb']:,.0f}" for row in rows("long_context", question="video")]
    yield in_row("D30", "long_context", f"{peaks[-1]} MB in a process of four, {peaks[0]} decoded whole")


def test_figures_are_those_of_the_rows() -> None:
    assert missing(figures()) == []
