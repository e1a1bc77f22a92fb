"""Figures in the documents are those of the rows in results/: each sentence here is made of rows and must be there."""

import re
from collections.abc import Callable
from statistics import median

import pytest

from experiments.declared import FIGURES
from experiments.registry import BY_NAME
from tests.helpers.figures import ROOT, Sentences, missing, one, rows, span
from tests.nullcuda.tables import causes, depth, runs

PERFORMANCE, LONG = "docs/performance.md", "docs/long-context.md"
CHECKPOINTS = "docs/checkpoints.md"
CHAOS, CHAOS_PAGE = "python -m experiments.chaos", "experiments/chaos/README.md"


def overhead() -> Sentences:
    single, four = ([row["ratio"] for row in rows("overhead", micro_batches=n)] for n in (1, 4))
    yield PERFORMANCE, f"over all rounds on record {span(single)} ×"
    asked = "python -m experiments.overhead --rounds"
    row = one("overhead", command=f"{asked} 3")
    yield (
        PERFORMANCE,
        f"{row['ratio']:.2f} × the plain one's time ({row['dhp_step_s']:.2f} s, {row['hf_step_s']:.2f} s)",
    )
    for rounds, end in ((7, ";"), (3, ":")):
        row = one("overhead", command=f"{asked} {rounds} --micro-batches 4")
        yield PERFORMANCE, f"({row['dhp_step_s']:.2f} s, {row['hf_step_s']:.2f} s){end}"


def checkpoint() -> Sentences:
    saved = one("micro", question="checkpoint")
    own = f"For {saved['mb']} MB a rank training waits {saved['dhp_background_stall_s']:.3f} s"
    yield CHECKPOINTS, f"{own}, and the files are on the disk after {saved['dhp_background_done_s']:.2f} s"
    yield CHECKPOINTS, f"takes {saved['torch_async_stall_s']:.3f} s and {saved['torch_async_done_s']:.2f} s"


def kernels() -> Sentences:
    found = [row["ratio"] for row in rows("micro", question="kernels")]
    yield "experiments/micro/README.md", f"{span(found)} × as fast as the library's own code"


def tensor_host() -> Sentences:
    ratio = {(row["recompute"], row["way"]): row["ratio"] for row in rows("micro", question="tensor_host")}
    ours, theirs = ([ratio[how, way] for how in ("none", "all")] for way in ("tensor 2", "tensor 2, library's styles"))
    told = f"by transformers' own styles {theirs[0]:.1f} × ({theirs[1]:.1f} ×)"
    yield PERFORMANCE, f"{ours[0]:.2f} × ({ours[1]:.2f} × with everything recomputed); {told}"


def experts() -> Sentences:
    found = rows("micro", question="experts", text="expert 2")
    yield PERFORMANCE, f"a step took {found[0]['step_ratio']:.2f} of the time"


def families() -> Sentences:
    for samples, words in (("mixed", "mixed lengths"), ("even", "of one length")):
        ratios = [row["ratio"] for row in rows("families_speed", samples=samples)]
        yield PERFORMANCE, f"{words}: {median(ratios):.2f} × ({min(ratios):.2f} to {max(ratios):.2f})"


def finetuning() -> Sentences:
    frozen = {row["train"]: row for row in rows("finetuning", question="frozen")}
    speeds = [f"{frozen[name]['speed_ratio']:.2f}" for name in ("nothing", "projector")]
    bounds = [f"{frozen[name]['bound_ratio']:.2f}" for name in ("nothing", "projector")]
    yield PERFORMANCE, f"tower frozen {speeds[0]} × as fast, its projector alone trained {speeds[1]} × "
    yield PERFORMANCE, f"({bounds[0]} × and {bounds[1]} × by what must remain)"
    text, both = (one("finetuning", question="lora", train=f"lora_{part}") for part in ("text", "both"))
    even, both_even = (one("finetuning", question="lora_even", train=f"lora_{part}") for part in ("text", "both"))
    plain = [f"{row['to_plain']:.2f}" for row in (text, even, both, both_even)]
    yield PERFORMANCE, f"{plain[0]} × the time of peft in a plain loop ({plain[1]} ×), on both parts {plain[2]} × "
    yield PERFORMANCE, f"({plain[3]} ×)"
    speed = [f"{row['speed_ratio']:.2f}" for row in (text, even, both, both_even)]
    yield PERFORMANCE, f"{speed[0]} × as fast as full training (samples of one length: {speed[1]} ×)"
    yield PERFORMANCE, f"on both parts {speed[2]} × ({speed[3]} ×)"


def preferences() -> Sentences:
    row, page = one("preferences"), "docs/preferences.md"
    trl, given = row["beside_trl"], row["beside_trl_cached"]
    yield page, f"takes {row['beside_sft']:.2f} × the time of one of fine-tuning on the same tokens"
    yield page, f"{trl:.2f} × that of TRL's on a CPU ({given:.2f} × with the reference given to it"


def driver_scale() -> Sentences:
    names = ("sparse", "sparse, one pass", "dense", "dense, apart")
    sparse, single, dense, apart = (one("driver_scale", ranks=64, routes=name)["step_s"] for name in names)
    yield PERFORMANCE, f"{sparse / dense:.2f} × with routes that the data need than from everyone to everyone, "
    page, whole = "experiments/driver_scale/README.md", f"{single / dense:.2f} ×"
    yield PERFORMANCE, f"{whole} where vision takes all pictures in one pass"
    yield page, f"a sparse step takes {sparse / dense:.2f} × the dense one, and one with one pass {whole} ("
    yield page, f"({single / apart:.2f} × the dense one with a call for each"


def handoff() -> Sentences:
    shared, store = rows("micro", question="handoff", megabytes=64)
    step = one("micro", question="handoff", transport="shared_memory", patches=17356)
    yield PERFORMANCE, f"{shared['ratio']:.1f} × one copy of them ({1000 * shared['handoff_s']:.1f} ms)"
    yield PERFORMANCE, f"object store {store['ratio']:.1f} ×"
    yield PERFORMANCE, f"at 17,356 patches: {step['transfer_share']:.1%} of it"


def two_hosts() -> Sentences:
    whole, quarter = ([row for row in rows("two_hosts", kv_ratio=ratio, direction="both") if "ring_over_2d" in row][0]
                      for ratio in (1.0, 0.25))  # fmt: skip
    of_ring, of_ulysses = (
        [f"{1 / row[f'{name}_over_2d']:.2f} ×" for row in (whole, quarter)] for name in ("ring", "ulysses")
    )
    yield PERFORMANCE, f"takes {of_ring[0]} a ring's time and {of_ulysses[0]} Ulysses' ({of_ring[1]}, {of_ulysses[1]} "


def long_context() -> Sentences:
    longest = {row["way"]: row for row in rows("long_context", question="longest")}
    ring, ulysses = (longest[f"offload, mlp_chunks 16, {way} 4"]["to_one_rank"] for way in ("ring", "ulysses"))
    yield PERFORMANCE, f"{ring:.2f} × (ring) and {ulysses:.2f} × (Ulysses) one rank's"
    ways = ("plain transformers, full checkpointing", "full", "full, mlp_chunks 16", "offload, mlp_chunks 16")
    plain, full, chunks, offload = (f"{longest[way]['tokens']:,}" for way in ways)
    yield (
        PERFORMANCE,
        f"{plain} tokens; one rank {full}, with `mlp_chunks=16` {chunks}, and `recompute=offload` {offload}",
    )
    steps: dict[str, list[float]] = {}
    for row in rows("long_context", question="steps"):
        steps.setdefault(row["way"], []).append(row["speed_to_peer"])
    yield PERFORMANCE, f"Ulysses {span(steps['ulysses 4'])}, two-ended ring {span(steps['ring 4'])} (plain ring "
    yield (
        PERFORMANCE,
        f"(plain ring {span(steps['ring 4, each the next part'])}), 2D {span(steps['ring 2 × ulysses 2'])}",
    )
    yield PERFORMANCE, f"ring × tensor {span(steps['ring 2 × tensor 2'])}"
    two = [row for row in rows("long_context", question="inference", ranks=2) if row["way"].startswith("dhp")]
    prefill = span([row["first_token_speed_to_plain"] for row in two], 1)
    yield PERFORMANCE, f"{prefill} × as fast as transformers in one process"
    for way in ("one stage, by tokens", "one stage, by pictures"):
        ratios = [row["one_to_two"][way] for row in rows("long_context", question="two_stages") if "row" in row]
        whole = one("long_context", question="two_stages", way="all rows")["one_to_two"][way]
        yield PERFORMANCE, f"{whole:.2f} × {'as fast ' * ('tokens' in way)}({span(ratios)}) as where"
    for way in ("balanced", "balanced, long ones apart"):
        row = one("long_context", question="sampler", way=way)
        figures = f"{row['sp_ratio_step']:.3f} | {row['sp_ratio_auto']:.3f} | {row['dist_flops']:.3f}"
        yield LONG, f"| {way} | {figures} |"
    peaks = [f"{row['peak_mb']:,.0f} MB |" for row in rows("long_context", question="video")]
    for title, peak in zip(("(`data.video_whole_frames=null`)", "one vision actor", "two", "four"), peaks, strict=True):
        yield LONG, f"{title} | {peak}"


def longest_sequence() -> Sentences:
    def ratio(layout: str, recompute: str = "none", counted: str = "device") -> float:
        found = one("longest_sequence", layout=layout, ranks=4, counted=counted, recompute=recompute)
        return found["ratio_to_one_rank"]

    sharded = [ratio("SP+TP, sharded norms", recompute) for recompute in ("none", "full")]
    yield PERFORMANCE, f"with `text.sequence_sharded_norms` {sharded[0]:.2f} × and {sharded[1]:.2f} ×"
    plain = f"SP+TP {ratio('SP+TP'):.2f} ×, TP {ratio('TP'):.2f} ×, ZeRO-3 {ratio('ZeRO-3'):.0f} ×"
    full = f"{ratio('SP+TP', 'full'):.2f} ×, {ratio('TP', 'full'):.2f} ×, {ratio('ZeRO-3', 'full'):.0f} ×"
    yield PERFORMANCE, f"{plain} (`--recompute full --budget-mib 24`: {full})"


def recompute() -> Sentences:
    whole, chosen = rows("recompute", mode="speed")
    alone = f"with whole layers alone {whole['auto_vs_full']:.2f} × ({whole['bound']:.2f} ×)"
    yield PERFORMANCE, f"keeping everything gives {chosen['none_vs_full']:.2f} ×); {alone}"
    yield PERFORMANCE, f"{chosen['auto_vs_full']:.2f} × as fast (operations allow {chosen['bound']:.2f} ×"


def layouts() -> Sentences:
    beside = [(1024, 30), (4096, 30), (9216, 9), (16384, 4)]  # patches, steps of the runs that are told of

    def step(layout: str, patches: int, steps: int) -> float:
        found = rows("layouts", layout=layout, patches=patches, steps=steps, shape="vision-dominated")
        return found[0]["step_s"]

    told = ", ".join(f"{step('DP', *run) / step('ddp', *run):.2f}" for run in beside)
    yield PERFORMANCE, f"1k to 16k patches: {told} × its step"
    links = [(1024, 3), (4096, 3)]
    to_ddp = [f"{step('DP', *run) / step('ddp', *run):.2f}" for run in links]
    to_tp = [step("TP", *run) / step("SP+TP", *run) for run in links]
    yield (
        PERFORMANCE,
        f"(`--links`, 1k and 4k): {to_ddp[0]}, {to_ddp[1]} ×, and SP+TP {to_tp[0]:.2f}, {to_tp[1]:.2f} ×",
    )
    for patches in (1024, 4096):
        of = {row["layout"]: row["step_s"] for row in rows("layouts", shape="as 32B", patches=patches)}
        seconds = " | ".join(f"{of[name]:.3f}" for name in ("plain", "SP+TP", "TP"))
        yield "experiments/layouts/README.md", f"| {patches:,} | {seconds} | {of['TP'] / of['SP+TP']:.2f} | "
    (command,) = {row["command"] for row in rows("layouts", layout="deepspeed-autosp")}
    found = {(row["layout"], row["patches"]): row for row in rows("layouts", command=command)}
    for name in {layout for layout, _ in found}:
        pairs = [(found[name, patches], found["ddp", patches]) for patches in (1024, 4096)]
        figures = [
            f"{one['step_s']:.3f} | {one['step_s'] / ddp['step_s']:.2f} | {one['peak_activation_bytes'] / 2**20:.0f} | "
            f"{one['comm_bytes'] / 2**20:.0f}"
            for one, ddp in pairs
        ]
        yield "experiments/layouts/README.md", f"| {name} | {' | '.join(figures)} |"
    by_ddp = {
        name: ", ".join(f"{found[name, size]['step_s'] / found['ddp', size]['step_s']:.2f}" for size in (1024, 4096))
        for name in {layout for layout, _ in found}
    }
    yield (
        PERFORMANCE,
        f"DP {by_ddp['DP']}, SP+TP {by_ddp['SP+TP']}, dhp's ZeRO-3 {by_ddp['ZeRO-3']}; FSDP2 {by_ddp['fsdp2']}, ",
    )
    yield PERFORMANCE, f"DeepSpeed ZeRO-3 {by_ddp['deepspeed-zero3']}, DeepSpeed AutoSP {by_ddp['deepspeed-autosp']}, "
    yield PERFORMANCE, f"transformers' TP {by_ddp['transformers-tp']} (two idle cores"


def chaos() -> Sentences:
    points, outside = rows("chaos", command=f"{CHAOS} --points"), rows("chaos", command=f"{CHAOS} --runs 20")
    (hopeless,) = [row for row in outside if row["process"] == "lost"]
    every = [*points, *(row for row in outside if row is not hopeless), one("chaos", command=f"{CHAOS} --partition")]
    assert all(row["completed"] and row["identical"] and not row["problems"] for row in every)
    assert not any(row["samples_lost"] or row["samples_repeated"] for row in every)
    names = len({row["point"] for row in points})
    counted = f"{len(points)} kills at {names} named points, {len(outside)} faults from outside and a cut link"
    yield CHAOS_PAGE, counted
    assert not hopeless["completed"]
    yield CHAOS_PAGE, f"goes on {hopeless['attempts'] - 1} times and then ends"
    idle = [row for row in points if row["machine"] == "idle"]
    for key, what in (("detect_s", "noticed"), ("first_step_s", "followed by a step of the next attempt")):
        known = [row[key] for row in idle if row[key] is not None]
        yield CHAOS_PAGE, f"{what} after {median(known):.1f} s in the median and {max(known):.1f} s at most"
    lost = max(row["lost_steps"] or 0 for row in points)
    yield CHAOS_PAGE, f"{lost} steps at most were made again"
    for row in outside:
        if row["fault"] == "stop" and row["detect_s"] is not None:
            yield CHAOS_PAGE, f"{row['process']} {row['detect_s']:.0f} s"


def sight() -> Sentences:
    page, kinds = "experiments/sight/README.md", ("shape", "colour", "count", "place", "word")
    for row in rows("sight"):
        if "right" in row:
            shares = " | ".join(f"{row['right'][kind]:.0%}" for kind in kinds)
            most = 100 * max(row["exchanged"][kind] - row["chance"][kind] for kind in kinds)
            losses = f"{most:+.0f} | {row['loss_right']:.2f} | {row['loss_exchanged']:.2f}"
            samples = int(row["command"].split("--samples ")[1].split()[0])
            yield page, f"| {row['seed']} | `{row['what']}` | {row['steps']:,} | {samples:,} | {shares} | {losses} |"
    assert rows("sight")[-1]["goal"] == "missed" and len(rows("sight", what="scratch")) == 5
    same = [(row["same"], row["asked"]) for row in rows("sight", what="exported")]
    assert same == [(100, 100)] * 5
    yield page, f"at most {max(row['off'] for row in rows('sight', what='layout')):.1e} off one actor's"


def gpu_check() -> Sentences:
    kernels, page = {row["row"]: row for row in rows("gpu", section="kernels")}, "experiments/gpu_check/README.md"
    norm, rotary, gate = (
        kernels[name] for name in ("RMS norm", "rotary positions of the tower", "gate in a fresh process")
    )
    yield page, f"RMS norm takes {norm['fused_ms']:.2f} ms in place of {norm['own_ms']:.2f}"
    yield page, f"{rotary['compiled_forward_ms']:.2f} in place of {rotary['own_forward_ms']:.2f} forward"
    yield page, f"{rotary['compiled_backward_ms']:.2f} in place of {rotary['own_backward_ms']:.2f} backward"
    yield page, f"a compiled gate {gate['fused_ms']:.2f} in place of {gate['own_ms']:.2f}"
    states = one("gpu", row="states")
    yield page, f"states at full depth are {states['between_steps_bytes'] / 1e9:.1f} GB"
    yield page, f"{states['dry_run_least_bytes'] / 1e9:.1f} and {states['dry_run_most_bytes'] / 1e9:.1f}"


def h200() -> Sentences:
    about = one("h200", row="about")
    yield PERFORMANCE, f"(commit {about['commit']}, torch {about['torch']}, Qwen2.5-VL 3B at full depth"
    yield PERFORMANCE, f"One {about['device'].removeprefix('NVIDIA ')} ran the whole product"
    steps = rows("h200", kind="train")
    halves = len(steps) // 2  # the runs with `light`, and with nothing recomputed
    light, kept = steps[:halves], steps[halves:]
    by_ray = [median(step[key] for step in kept[1:]) for key in ("step_s", "mfu")]
    alone, padded = (one("h200", row="step", kind="none", bytes=18, pad=pad, cudnn=0) for pad in (0, 1))
    eight = one("h200", row="step", kind="light", samples="8", pad=1)
    plain = one("h200", row="plain, flash", kind="none")
    for what, seconds, mfu in (
        ("both engines in one process, nothing recomputed", alone["step_ms"] / 1e3, alone["mfu"]),
        ("the same by Ray in two processes, `cuda_ipc`", *by_ray),
        ("plain transformers with flash attention, fused AdamW", plain["step_ms"] / 1e3, plain["mfu"]),
        ("the tower's MLP with 3,456 columns in place of 3,420", padded["step_ms"] / 1e3, padded["mfu_published"]),
        ("8 samples, light, so padded, cuDNN's attention", eight["step_ms"] / 1e3, eight["mfu_published"]),
    ):
        yield PERFORMANCE, f"| {what} | {seconds:.3f} | {mfu:.0%} |"
    most = [max(sum(step["memory_bytes"].values()) for step in of) / 2**30 for of in (kept, light)]
    yield PERFORMANCE, f"reserved {most[0]:.1f} GiB at most with nothing recomputed"
    yield PERFORMANCE, f"and {most[1]:.1f} with `light`"
    slow = one("h200", row="step", bytes=10, samples="4")
    yield PERFORMANCE, f"updates of 10 bytes ({slow['update_ms'] / 1e3:.2f} s of a step)"


def nullcuda() -> Sentences:
    page = "docs/developers/null-cuda.md"
    for line in (*runs(), *depth(), *causes()):
        yield page, line
    apart = {"nothing": 0.0, "kernels": 0.0, "layers": 0.0}
    for row in (row for row in rows("nullcuda") if "part" in row):
        off = abs(row["planned_peak_bytes"] / row["peak_bytes"] - 1)
        apart[row["compiled"]] = max(apart[row["compiled"]], off)
        more = 17_704_448 if row["part"] == "vision" and row["compiled"] != "layers" else 0  # zeros in padded products
        assert abs(row["planned_states_bytes"] / (row["between_steps_bytes"] - more) - 1) < 1e-4
    asked = max(apart["nothing"], apart["kernels"])
    yield page, f"within {asked:.1%} of the allocator's, states within 0.01% but for 17.7 MB"
    yield page, f"compiled whole, it plans up to {apart['layers']:.0%} too much"
    left = {of["left_bytes"] for row in rows("nullcuda") for of in row.get("stages", {}).values()}
    yield page, f"up to {max(left) / 1e6:.1f} MB"
    peaks = [of for row in rows("nullcuda") for of in row.get("stages", {}).values() if of["planned_bytes"]]
    yield page, f"up to {max(of['peak_bytes'] / of['planned_bytes'] - 1 for of in peaks):.0%} more than it says"


def make_train() -> Sentences:
    """Of the quickstart's own run; no file of results/ has it."""
    shown = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
    median, speed = (re.search(pattern, shown)[1] for pattern in (r"median step +([\d.]+) s", r"speed +(\d+) tokens/s"))
    yield PERFORMANCE, f"median step {median} s; {speed} tokens/s: the run that the quickstart shows"


HELD: list[Callable[[], Sentences]] = [
    overhead, kernels, tensor_host, experts, families, preferences, finetuning, driver_scale, handoff, two_hosts,
    long_context, longest_sequence, recompute, layouts, checkpoint, chaos, sight, gpu_check,
    h200, nullcuda, make_train,
]  # fmt: skip


@pytest.mark.parametrize("held", HELD, ids=lambda held: held.__name__)
def test_figures_are_those_of_the_rows(held: Callable[[], Sentences]) -> None:
    assert missing(held()) == []


def test_a_figure_that_the_rows_do_not_have_is_seen() -> None:
    page, words = next(overhead())
    assert missing([(page, words)]) == [] and missing([(page, words.replace("0.71", "0.73"))])


def test_every_file_of_results_has_a_sentence_of_its_rows() -> None:
    # The page of families is made of the first, tests/plan/bench/test_h200.py reads the second, and the third is of
    # `make nullcuda`; PAPERS.md's test and tests/experiments/test_balance_spread.py hold the others.
    elsewhere = {"families", "h200", "nullcuda", "balance_sweeps", "balance_preprocessing", "balance_spread"}
    files = {file.stem for file in (ROOT / "results").glob("*.jsonl")}
    assert files - elsewhere == {BY_NAME[name].result for name in FIGURES}
