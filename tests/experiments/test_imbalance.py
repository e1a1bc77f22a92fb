"""Spreads over stages, replicas and time, by hand; the ways of the experiment are configurations."""

import importlib
import json
import time
from functools import reduce
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from dhp.config.command_line import compose_config
from dhp.core.axes import Degrees
from dhp.observe.ranks import RankLine
from experiments.imbalance.__main__ import (
    CONFIG,
    IN_FLIGHT,
    REPLICAS,
    VISION_STAGES,
    WAYS,
    Row,
    activation_mib,
    device_of,
    device_tokens,
    forward_ms,
    main,
    make_work,
    moments,
    overrides,
    published_rows,
    spreads,
    tokens_of,
)
from experiments.imbalance.inject.sitecustomize import FUNCTIONS, timed
from experiments.imbalance.training import TABLE_7, replays
from experiments.pair import join_alone
from tests.helpers.figures import Sentences, cells, missing, one, rows, short
from tests.helpers.graphs import make_graph

PAPERS = "experiments/PAPERS.md"
PAGE = "experiments/imbalance/README.md"
STAGES = ("vision.0", "vision.1", "text.0", "text.1", "text.2")


def forwards(seconds: dict[str, float], micro_batches: int = 2) -> list[Row]:
    """Of two replicas, the second of which takes twice as long."""
    return [
        {"stage": stage, "rank": rank, "micro_batch": number, "seconds": own * (1 + rank), "back": back}
        for stage, own in seconds.items()
        for rank in (0, 1)
        for number in range(micro_batches)
        for back in (False, True)
    ]


def test_the_device_between_the_parts_has_stages_of_both() -> None:
    assert [device_of(name) for name in STAGES] == [0, 1, 1, 2, 3]
    found = forward_ms(forwards(dict.fromkeys(STAGES, 0.5)), 2)
    assert found.shape == (2, 4, 2)
    assert found[0].tolist() == [[500, 1000], [1000, 2000], [500, 1000], [500, 1000]]
    line = RankLine(step=1, activation_bytes={name: [2**20, 3 * 2**20] for name in STAGES})
    assert activation_mib([line, line])[1].tolist() == [[1, 3], [2, 6], [1, 3], [1, 3]]


def test_ranks_that_have_less_than_the_others_are_refused() -> None:
    with pytest.raises(ValueError, match=r"ranks wrote of \[1\] forwards, and each has 2"):
        forward_ms([*forwards({"vision.0": 1.0}, 1), *forwards({"text.0": 1.0}, 2)], 2)
    with pytest.raises(ValueError, match="step 4: a rank of text.1 measured no activations"):
        activation_mib([RankLine(step=4, activation_bytes={"text.1": [None, 1]})])


def test_a_rank_writes_what_a_forward_takes_of_its_core(tmp_path: Path) -> None:
    class Engine:
        spec = SimpleNamespace(name="text.1")

        def forward_step(self, micro_batch: int, chunk: int) -> int:
            time.sleep(0.2)
            begun = time.thread_time()
            while time.thread_time() - begun < 0.05:
                pass
            return chunk + 1

    with join_alone():
        assert timed(Engine.forward_step, str(tmp_path))(Engine(), 3, 6) == 7
    (file,) = tmp_path.glob("text.1-0-*.jsonl")
    (line,) = file.read_text().splitlines()
    told = json.loads(line)
    assert (told["stage"], told["rank"], told["micro_batch"], told["back"]) == ("text.1", 0, 3, False)
    assert 0.05 <= told["seconds"] < 0.15  # of the core: sleeping is none


def test_functions_that_are_timed_are_there() -> None:
    for module, functions in FUNCTIONS.items():
        for function in functions:
            assert callable(reduce(getattr, function.split("."), importlib.import_module(module)))


def test_patches_count_where_the_tower_is_and_tokens_where_the_decoder_is() -> None:
    found = device_tokens(np.array([[100, 200]]), np.array([[10, 30]]), 4)
    assert found[0].tolist() == [[100, 200], [110, 230], [10, 30], [10, 30]]


def test_deviations_are_those_that_the_paper_prints() -> None:
    # 148 and 402 of figure 2's panels: deviations of a population of four stages, digits behind the point cut off.
    values = np.array([[500, 160, 150, 160], [2000, 1600, 1000, 1100]], dtype=float)[:, :, None]
    first, last = moments({"forward_ms": values})
    assert (first["moment"], first["replica"], first["forward_ms"]) == ("T-0", "DP-0", [500, 160, 150, 160])
    assert [int(row["forward_ms_sd"]) for row in (first, last)] == [148, 402]
    *stages, between = spreads({"forward_ms": values})
    assert [row["stage"] for row in stages] == [1, 2, 3, 4] and stages[0]["row"] == "over time"
    assert (stages[0]["forward_ms"], stages[0]["forward_ms_sd"], stages[0]["forward_ms_spread"]) == (1250, 750, 0.6)
    assert between["row"] == "between stages"
    assert between["forward_ms"] == round((242.5 + 1425) / 2, 2)
    assert between["forward_ms_sd"] == round((values[0].std() + values[1].std()) / 2, 2)


def test_even_stages_have_no_deviation() -> None:
    assert {row["tokens_spread"] for row in spreads({"tokens": np.full((3, 4, 2), 7.0)})} == {0.0}


def test_a_moment_is_the_first_and_the_last() -> None:
    columns = {"forward_ms": np.arange(24.0).reshape(3, 4, 2), "activation_mib": np.arange(16.0).reshape(2, 4, 2)}
    found = {(row["moment"], row["replica"]): row for row in moments(columns)}
    assert found["T-0", "DP-1"]["forward_ms"] == [1, 3, 5, 7] == found["T-0", "DP-1"]["activation_mib"]
    assert found["T-1", "DP-0"]["forward_ms"] == [16, 18, 20, 22]
    assert found["T-1", "DP-0"]["activation_mib"] == [8, 10, 12, 14]


def test_the_published_table_has_our_columns() -> None:
    between, stage = published_rows()
    assert (between["forward_ms"], between["forward_ms_sd"], between["forward_ms_spread"]) == (85, 93, 1.094)
    assert (stage["memory_gb"], stage["memory_gb_sd"], stage["memory_gb_spread"]) == (73, 6, 0.082)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_run_has_the_batches_and_the_cut_of_its_way(way: str) -> None:
    config = compose_config(CONFIG.stem, str(CONFIG.parent), overrides(way, 3))
    training, balanced = config.training, way != "random batches"
    assert (training.schedule, training.batch_size, training.max_steps) == ("1f1b", 32, 3)
    assert (config.data.balance, config.data.packing) == ("balanced" if balanced else "random", balanced)
    cut = {"random batches": "parameters", "balanced batches": "parameters", "balanced batches, tried cuts": "bmp"}
    assert config.text.partition == cut.get(way, "exact")
    assert config.text.partition_trials == way.endswith(("measured cut", "tried cuts"))
    assert config.memory.accounting and config.cluster.chain and config.cluster.threads_per_actor == 1
    assert (config.vision.pipeline, config.vision.data) == (VISION_STAGES, REPLICAS)
    assert (config.text.pipeline, config.text.data) == (IN_FLIGHT + 1 - VISION_STAGES, REPLICAS)


@pytest.mark.parametrize("way", TABLE_7)
def test_a_run_of_table_7_has_all_that_the_one_before_has(way: str) -> None:
    config = compose_config(CONFIG.stem, str(CONFIG.parent), [*TABLE_7[way], "training.schedule=1f1b"])
    at = list(TABLE_7).index(way)
    assert (config.data.balance, config.data.packing) == (("isf", True) if at else ("random", False))
    assert (config.text.partition, config.text.partition_trials) == (("bmp", True) if at > 1 else ("parameters", False))
    assert {config.vision.recompute, config.text.recompute} == {"auto" if at > 2 else "full"}


def test_a_step_is_replayed_by_what_its_passes_took() -> None:
    """A tower and two stages of a decoder, two replicas and micro-batches: a micro-batch waits for the slower rank of
    the tower, a step for the slower replica."""
    graph = make_graph(Degrees(data=2), Degrees(data=2), stages=2)
    took = {"vision": (1.0, 3.0), "text.0": (2.0, 2.0), "text.1": (2.0, 4.0)}
    one_step = [
        {
            "stage": stage,
            "rank": rank,
            "micro_batch": number,
            "seconds": seconds[rank] * (2 if back else 1),
            "back": back,
        }
        for stage, seconds in took.items()
        for rank in (0, 1)
        for back in (False, True)
        for number in (0, 1)
    ]
    (found,) = replays(graph, one_step, 2, 1)
    alone = [row for row in one_step if row["rank"] == 1]
    (of_slowest,) = replays(graph, [*[row | {"rank": 0} for row in alone], *alone], 2, 1)
    # On the device of the tower and the first stage 3 + 3 + 2, then 4 + 8 of the last stage, 4 + 8 again, 4 + 6.
    assert found == of_slowest == 42
    with pytest.raises(ValueError, match=r"ranks wrote of \[2\] passes of a kind, and each has 4"):
        list(replays(graph, one_step, 2, 2))


def test_rows_are_drawn_and_others_refused(tmp_path: Path) -> None:
    columns = {"forward_ms": np.ones((2, 4, 2)), "activation_mib": np.ones((2, 4, 2))}
    drawn: list[Row] = [{"way": way} | row for way in ("a", "b") for row in (*moments(columns), *spreads(columns))]
    file, picture = tmp_path / "rows.jsonl", tmp_path / "rows.png"
    file.write_text("".join(json.dumps(row) + "\n" for row in drawn))
    main(["--read", str(file), "--plot", str(picture)])
    with Image.open(picture) as image:
        assert image.width > 4 * 270 and len(image.convert("RGB").getcolors(1 << 20) or ()) > 4
    file.write_text(json.dumps({"row": "between stages"}) + "\n")
    with pytest.raises(ValueError, match="no row is of a moment"):
        main(["--read", str(file), "--plot", str(picture)])


def test_a_run_in_which_nothing_would_be_timed_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--steps", "1"])
    assert "--steps 1: nothing is timed in the first step; take 2 or more" in capsys.readouterr().err


def figures() -> Sentences:
    """What the README has of the rows that are kept."""
    for row in rows("imbalance"):
        if row["row"] in ("over time", "between stages"):
            names = ("tokens", "forward_ms", "activation_mib")
            cells = [f"{row[name]:,.0f} ± {row[f'{name}_sd']:,.0f} ({row[f'{name}_spread']:.2f})" for name in names]
            yield PAGE, f"| {row['way']} | {row.get('stage', 'between')} | {' | '.join(cells)} |"
        elif row["row"] == "published":
            names = ("tokens", "forward_ms", "memory_gb")
            cells = [f"{row[name]:,} ± {row[f'{name}_sd']:,} ({row[f'{name}_spread']:.2f})" for name in names]
            yield PAGE, f"| published, {row['of']} | {' | '.join(cells)} |"


def papers() -> Sentences:
    """What PAPERS.md has of them."""
    ways = ("random batches", "balanced batches, tried cuts")
    before, after = (
        [one("imbalance", row="between stages", way=way)["forward_ms_spread"]]
        + [one("imbalance", row="over time", way=way, stage=stage)["forward_ms_spread"] for stage in (1, 4)]
        for way in ways
    )
    words = f"{before[0]:.2f}, {before[1]:.2f}; balanced {after[0]:.2f}, {after[1]:.2f} and {after[2]:.2f} of the last"
    yield PAPERS, words
    random, balanced = (max(map(apart, *replicas(way))) for way in ways)
    yield PAPERS, f"at most {random:.2f} × apart with random batches, {balanced:.2f} × with balanced ones"


def replicas(way: str) -> list[list[float]]:
    """Milliseconds of forwards of either replica, by moment and stage."""
    found = (rows("imbalance", row="moment", way=way, replica=replica) for replica in ("DP-0", "DP-1"))
    return [[value for row in own for value in row["forward_ms"]] for own in found]


def apart(first: float, second: float) -> float:
    return max(first, second) / min(first, second)


def test_the_documents_have_the_rows() -> None:
    assert missing(papers()) == []
    assert missing(figures()) == [] and len(list(figures())) == 5 * len(WAYS) + 2


@pytest.mark.slow
def test_random_rows_are_padded_and_balanced_ones_are_alike(tmp_path: Path) -> None:
    work = make_work(tmp_path, 2)
    random, balanced = (
        tokens_of(work, overrides(way, 2), 2, 4)[:, 3] for way in ("random batches", "balanced batches")
    )
    assert random.shape == balanced.shape == (8, 2)
    assert random.sum() > 1.1 * balanced.sum()
    assert balanced.std() / balanced.mean() < random.std() / random.mean()


def test_the_pages_have_table_7_as_it_was_trained() -> None:
    of_ways = [one("imbalance", row="training", way=way) for way in TABLE_7]
    random = of_ways[0]
    shares = [short(row["replay_s"] / random["replay_s"], 2) for row in of_ways[1:]]
    sentences = [("experiments/PAPERS.md", f"to random: {', '.join(shares)} by replay")]
    for row, share in zip(of_ways, ["1.00", *shares], strict=True):
        begin = cells(row["way"], f"{row['replay_s']:.3f}", share)
        sentences.append(("experiments/imbalance/README.md", begin))
    assert missing(sentences) == []
