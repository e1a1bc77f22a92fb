"""The tables in the experiments' READMEs have the figures of the rows in results/."""

from collections.abc import Callable, Iterator

import pytest

from tests.helpers.figures import Row, cells, fixed, missing, one, rows, short

Lines = Iterator[str]


def micro() -> Lines:
    found = (one("micro", question="compile", family=name) for name in ("qwen2_5_vl", "llava_clip"))
    qwen, llava = (f"{row['ratio']:.2f}" for row in found)
    yield f"a step of Qwen2.5-VL is {qwen} times as fast, one of LLaVA {llava} times"
    for row in rows("micro", question="tensor_host"):
        times = [f"{row[f'{way}_ms_a_layer']:.2f}" for way in ("forward", "backward")]
        way = row["way"].replace("library's", "transformers'")
        yield cells(row["recompute"], way, *times, format(row["ratio"], ".3g"))
    for row in rows("micro", question="experts"):
        name = f"`{row['text'].replace('expert', 'data 2, expert')}`"
        sent = [f"{row['all_reduce_mb']:.1f} MB", f"{row['all_to_all_mb']:.1f} MB".replace("0.0 MB", "0")]
        yield cells(row["tokens"], name, format(row["step_ratio"], ".2g"), *sent, f"{row['expert_mb']:.1f} MB")


def finetuning() -> Lines:
    ways = {"all": "all", "lora_text": "text's adapters", "lora_both": "both parts' adapters"}
    for question, lengths in (("lora", "mixed"), ("lora_even", "one length")):
        for row in rows("finetuning", question=question):
            speed = "1" if row["train"] == "all" else f"{row['speed_ratio']:.2f}"
            seconds = [f"{row[key]:.2f} s" for key in ("step_s", "plain_step_s")]
            sizes = [f"{row[key] / 1e6:.1f} MB" for key in ("optimizer_bytes", "gradient_bytes")]
            yield cells(lengths, ways[row["train"]], speed, fixed(row["to_plain"]), *seconds, *sizes)


def driver_scale() -> Lines:
    for row in rows("driver_scale"):
        seconds = [f"{row[key]:.2f}" for key in ("submit_s", "step_s", "floor_s")]
        yield cells(row["ranks"], row["routes"], row["calls"], row["refs"], *seconds)


def two_hosts() -> Lines:
    titles = {
        "ring": "ring of 4",
        "ulysses": "Ulysses over both hosts",
        "2d": "2D: ring of 2 across, Ulysses inside",
        "2d_gather": "2D, gathered",
    }
    for layout, title in titles.items():
        found = [one("two_hosts", layout=layout, heads=32, direction="both", kv_ratio=share) for share in (1.0, 0.25)]
        yield cells(title, *(f"{row['measured_s']:.2f} ({row['ratio']:.2f})" for row in found))


def long_context() -> Lines:
    ways = {"ulysses 4": "ulysses 4", "ring 4": "ring 4 (two-ended)", "ring 2 × ulysses 2": "ring 2 × ulysses 2"}
    for way, title in ways.items():
        found = rows("long_context", question="steps", way=way)
        yield cells(title, *(f"{row['seconds']:.3g} s, {row['speed_to_peer']:.2f}" for row in found))
    for row in rows("long_context", question="longest", ranks=4)[:1]:
        yield f"{row['tokens']:,} ({row['to_one_rank']:.2f})"
    for way in ("dhp, ulysses 2", "dhp, ring 2", "dhp, tensor 2", "dhp, ulysses 4", "dhp, ring 4"):
        found = rows("long_context", question="inference", way=way)
        first, decode = (
            [f"{row[f'{what}_speed_to_plain']:.2f}" for row in found] for what in ("first_token", "decode")
        )
        yield cells(way, *first, *decode)


def longest_sequence() -> Lines:
    for recompute in ("none", "full"):
        for counted in ("device", "vision"):
            for layout in ("SP+TP", "SP+TP, sharded norms", "TP", "TP, sharded norms", "ZeRO-3", "FSDP2"):
                found = rows("longest_sequence", layout=layout, counted=counted, recompute=recompute)
                told = [str(found[0]["patches"])]
                told += [f"{row['patches']} ({row['ratio_to_one_rank']:.2f})" for row in found[1:]]
                yield cells(layout, *told)


OF_CHAIN = (
    "python -m experiments.layouts --sizes 1k 4k --rounds 2 --steps 4 --shapes vision-dominated "
    "--only ddp DP SP+TP TP chain"
)


def layouts() -> Lines:
    def step(layout: str, wanted: Row) -> float:
        return rows("layouts", layout=layout, **wanted)[0]["step_s"]

    for patches, steps in ((1024, 8), (4096, 8), (9216, 3), (16384, 2)):
        wanted = {"shape": "balanced", "patches": patches, "steps": steps}
        plain, ddp, dp, both, tp = (step(layout, wanted) for layout in ("plain", "ddp", "DP", "SP+TP", "TP"))
        beside = [f"{dp / ddp:.2f}", f"{plain / dp:.2f}", f"{both:#.3g}", f"{tp:#.3g}", f"{tp / both:.2f}"]
        seconds = [f"{plain:#.3g}", f"{ddp:#.3g}", f"{dp:#.3g}", *beside]
        yield cells(patches, str(steps), *seconds)
    for shape, between, end in (("vision-dominated", " and ", " s"), ("balanced", ", ", "")):
        for layout in ("ZeRO-3", "SP+TP"):
            small, large = (step(layout, {"shape": shape, "patches": n, "steps": 8}) for n in (1024, 4096))
            yield f"{small:.3f}{between}{large:.2f}{end}"
    for patches in (1024, 4096):
        wanted = {"shape": "vision-dominated", "patches": patches, "command": OF_CHAIN}
        plain, ddp, *ours = (step(layout, wanted) for layout in ("plain", "ddp", "DP", "SP+TP", "TP", "chain"))
        ratios = [f"{ours[0] / ddp:.2f}", f"{ours[2] / ours[1]:.2f}", f"{plain / ours[3]:.2f}"]
        yield cells(patches, *(f"{seconds:.3f}" for seconds in (plain, ddp, *ours)), *ratios)
    for patches in (1024, 4096):
        wanted = {"shape": "vision-dominated", "patches": patches, "steps": 3}
        ddp, dp, both, tp = (step(layout, wanted) for layout in ("ddp", "DP", "SP+TP", "TP"))
        ratios = (f"{dp / ddp:.2f}", f"{both:.3f}", f"{tp:.3f}", f"{tp / both:.2f}")
        yield cells(patches, f"{ddp:.3f}", f"{dp:.3f}", *ratios)


def balance() -> Lines:
    of_dist = ("dist_vision", "dist_assigned", "dist_text", "dist_flops")
    for row in rows("balance", source="made 1.2M"):
        if row["dp"] == 8 or row["method"] in ("balanced", "balanced_stages"):
            dist = [short(row["pad"], 3), *(short(row[key], 4) for key in of_dist)]
            spread = [short(row[key], 3) for key in ("cv_vision", "cv_text", "stage_idle")]
            ends = [fixed(row["bias"]), row["packs"], fixed(row["seconds"]), fixed(row["time_to_even"])]
            yield cells(row["method"], row["dp"], *dist, *spread, *ends)
    for source in ("ai2d", "chartqa"):
        for method in ("isf", "balanced", "balanced_stages"):
            row = one("balance", source=source, dp=8, method=method)
            dist = [short(row[key], 4) for key in of_dist]
            spread = [short(row[key], 3) for key in ("cv_vision", "cv_text")]
            yield cells(source, row["method"], *dist, *spread, fixed(row["bias"]), row["packs"])


def convergence() -> Lines:
    for row in rows("convergence"):
        if "summary" in row:
            steps = "–".join(map(str, sorted({*row["steps"]})))
            ends = (f"{row['heldout_mean']:.3f}", f"{row['heldout_sd']:.3f}")
            yield cells(f"`{row['summary']}`", len(row["seeds"]), steps, *ends)


def partition() -> Lines:
    yield from partition_published()
    for row in rows("partition", question="replay"):
        chain = f"{row['stages']}, {row['micro_batches']}"
        times = [fixed(row["step_s"]), fixed(row["planned_s"]), fixed(row["to_exact"])]
        method = [f"`{row['method']}`", listed(row["layers"])]
        yield cells(chain, row["frozen"], *method, *times, fixed(row["speed_to_parameters"]))
    yield from partition_said()


def partition_said() -> Lines:
    def of(frozen: str, method: str) -> Row:
        return one("partition", question="replay", frozen=frozen, method=method)

    def planned(frozen: str, method: str) -> str:
        return fixed(of(frozen, method)["planned_s"] / of(frozen, "exact")["planned_s"])

    yield f"the exact cut is {fixed(of('nothing', 'parameters')['to_exact'])} × as fast as the one by parameters"
    yield f"BMP by forward takes {fixed(of('vision', 'bmp by forward')['to_exact'])} × the exact cut's time"
    yield f"({fixed(of('vision', 'parameters')['to_exact'])}, planned {planned('vision', 'parameters')})"
    yield f"BMP by forward finds the exact cut as well ({fixed(of('text', 'bmp by forward')['to_exact'])})"
    yield f"fast ({fixed(of('text', 'layers')['to_exact'])}; planned {planned('text', 'layers')})"
    for row in rows("partition", question="wall"):
        seconds = [fixed(row["wall_s"]), fixed(row["replay_s"]), fixed(row["wall_to_replay"], 3)]
        yield cells(f"`{row['method']}`", *(", ".join(stages) for stages in row["devices"]), *seconds)


def partition_published() -> Lines:
    for row in rows("partition", question="variances"):
        published = "-" if row["published"] is None else f"{row['published']:g}"
        yield cells(f"`{row['method']}`", row["column"], f"{row['ours']:g}", published, agreed(row), row["why"])
    for row in rows("partition", question="free memory"):
        yield cells(row["stage"], row["column"], f"{row['ours']:g}", f"{row['published']:g}", agreed(row), row["why"])
    for row in rows("partition", question="stages"):
        layers = [listed(row[key]) for key in ("ours", "bmp", "published")]
        again = [listed(row[key]) for key in ("recomputed", "needed_by_published", "published_recomputed")]
        yield cells(row["model"], *layers, row["off"], f"{row['regret']:+.1%}", agreed(row), *again)
        yield cells(row["model"], " ".join(f"{free:g}" for free in row["free_gb"]))


def agreed(row: Row) -> str:
    return {True: "yes", False: "no", None: "-"}[row["agrees"]]


def listed(counts: list[int]) -> str:
    return ",".join(map(str, counts))


def span(shares: list[float]) -> str:
    return f"{shares[0]:.1%} to {shares[1]:.1%}"


TABLES: list[Callable[[], Lines]] = [
    micro, finetuning, driver_scale, two_hosts, long_context, longest_sequence,
    layouts, balance, convergence, partition,
]  # fmt: skip


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.__name__)
def test_tables_have_the_figures_of_the_rows(table: Callable[[], Lines]) -> None:
    page = f"experiments/{table.__name__.strip('_')}/README.md"
    assert missing((page, line) for line in table()) == []
