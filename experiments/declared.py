"""Of each experiment the figures of its sentence, the main one first. One that is missing here has no sentence yet."""

from experiments import figures
from experiments.figures import Figure, column, percent, ratio

RAY, LONG, OMNI = "Ray system, README", "LongVILA", "OmniBal"

FIGURES: dict[str, tuple[Figure, ...]] = {
    "balance": (
        Figure("`balanced` packs have a text DistRatio of {} at 8 replicas", "balanced, text",
               column("dist_text", method="balanced", source="made 1.2M", dp=8), ""),
        Figure("ISF's have {}", "ISF, text", column("dist_text", method="isf", source="made 1.2M", dp=8), "",
               f".144, {OMNI}, table 3, on another set")),
    "beside_trl": (
        Figure("one tower and one decoder take {} TRL's seconds a step", "1 + 1 over TRL's",
               column("of_trl", trainer="dhp 1 + 1", answer_tokens=0)),
        Figure("with two replicas {}", "data 2 over TRL's", column("of_trl", trainer="dhp data 2", answer_tokens=0)),
        Figure("with answers of 200 tokens {}", "1 + 1, long answers",
               column("of_trl", trainer="dhp 1 + 1", answer_tokens=200)),
        Figure("with two replicas {}", "data 2, long answers",
               column("of_trl", trainer="dhp data 2", answer_tokens=200))),
    "chaos": (
        Figure("{} faults end to the bit as if nothing had been", "ends to the bit, %", figures.intact, share=True),
        Figure("a step follows {} after a kill", "s to the next step", figures.first_steps, " s")),
    "convergence": (
        Figure("held-out loss of `balanced` packs ends {} below random batches'", "balanced",
               figures.differences("balanced"), ""),
        Figure("ISF's {} below", "ISF", figures.differences("isf"), ""),
        Figure("a split tower's {} below", "split tower", figures.differences("sequence"), "",
               f"curves of equal loss, {LONG}, figure 12, of the decoder")),
    "driver_scale": (
        Figure("at the most ranks a step with sparse routes takes {} the dense one's time",
               "sparse over dense", figures.sparse),),
    "families": (
        Figure("the usual loop takes {} a step's time of packed rows of mixed lengths", "mixed lengths",
               column("ratio", samples="mixed")),
        Figure("where all samples have one length {}", "one length", column("ratio", samples="even")),
        Figure("with each sample's state by itself {} of packed rows", "by segment", column("by_segment"))),
    "finetuning": (
        Figure("a step with a frozen tower is {} as fast as full training", "frozen tower",
               column("speed_ratio", question="frozen", train="nothing")),
        Figure("a step that trains the projector alone is {} as fast", "projector alone",
               column("speed_ratio", question="frozen", train="projector")),
        Figure("with adapters on text it takes {} the time of peft in a plain loop", "adapters over peft's",
               column("to_plain", question="lora", train="lora_text"))),
    "five_layouts": (
        Figure("losses are {} off plain transformers'", "off the plain loop's", column("loss_error"), ""),),
    "gpu_check": (
        Figure("{} kernels that ran on a GPU are right", "right kernels, %", figures.right_kernels, share=True),),
    "imbalance": (
        *figures.uneven("random batches", f"1.09, {OMNI}, table 1", "1.14 of the first stage"),
        *figures.uneven("balanced batches, tried cuts")),
    "layout_choice": (
        Figure("{} of models, GPUs and row lengths have a layout that fits", "have a layout, %", figures.fitting,
               share=True),
        Figure("the first one reaches {} of the peak by data sheets", "planned MFU", column("mfu", fits=True), "")),
    "layouts": (
        Figure("in one host's memory TP takes {} SP+TP's step", "TP over SP+TP",
               figures.layouts("TP", "SP+TP", False), " ×", f"1.26 to 1.37 × on 8 H100, {RAY}"),
        Figure("with links as slow as a GPU's {}", "TP over SP+TP, slow links", figures.layouts("TP", "SP+TP", True)),
        Figure("with such links and the proportions of Qwen2.5-VL-32B {}", "TP over SP+TP, slow links, as 32B",
               figures.layouts("TP", "SP+TP", True, large=True)),
        Figure("DP takes {} DDP's", "DP over DDP", figures.layouts("DP", "ddp", False))),
    "long_context": (
        Figure("the first token of two ranks comes {} as soon as of one process", "first token, two ranks",
               figures.answers, " ×", f"8.2 × with eight GPUs beside a split by layers, {LONG}, table 3"),
        Figure("steps by Ulysses are {} as fast as DeepSpeed's", "Ulysses over DeepSpeed's",
               column("speed_to_peer", question="steps", way="ulysses 4")),
        Figure("four ranks of a ring hold rows {} as long as one", "longest row, ring 4",
               column("to_one_rank", question="longest", way="offload, mlp_chunks 16, ring 4")),
        Figure("prompts {} as long", "longest prompt, ring 4",
               column("to_one_rank", question="longest_prompt", way="dhp, ring 4")),
        Figure("with long samples apart the DistRatio of operations is {}", "Dist of operations, apart",
               column("dist_flops", question="sampler", way="balanced, long ones apart"), ""),
        Figure("together {}", "Dist of operations, together",
               column("dist_flops", question="sampler", way="balanced"), "")),
    "longest_sequence": (
        Figure("SP+TP on 4 ranks takes images {} as long as one rank", "SP+TP", figures.longest("SP+TP")),
        Figure("TP {}", "TP", figures.longest("TP")),
        Figure("ZeRO-3 {}", "ZeRO-3", figures.longest("ZeRO-3"), " ×",
               f"out of memory from 16k patches on, where SP+TP goes on to 65k, {RAY}")),
    "micro": (
        Figure("64 MB are on their way {} as long as one copy takes", "hand-off over copy",
               column("ratio", question="handoff", transport="shared_memory")),
        Figure("a layer cut over two tensor ranks costs the host {} a whole one", "tensor 2",
               column("ratio", question="tensor_host", way="tensor 2")),
        Figure("by the library's styles {}", "library's styles",
               column("ratio", question="tensor_host", way="tensor 2, library's styles")),
        Figure("training waits {} for a checkpoint in the background", "wait, s",
               column("dhp_background_stall_s", question="checkpoint"), " s"),
        Figure("{} as long as for torch's asynchronous one", "wait, over torch's",
               column("stall_ratio", question="checkpoint")),
        Figure("compiled layers make a step {} as fast", "compiled", column("ratio", question="compile")),
        Figure("dhp's kernels {}", "dhp's kernels", column("ratio", question="kernels")),
        Figure("a step of replicas that share experts out takes {} that of tensor ranks", "shared out",
               column("step_ratio", question="experts", text="expert 2"))),
    "needle_frames": (
        Figure("a model of videos of up to 64 frames finds {} of the needles in 512", "long, 512 frames",
               percent(column("found", trained_on="long", frames=512)), "%",
               f"99.5% at 1,400 frames, {LONG}, figure 11"),
        Figure("one of up to 8 frames {}", "short, 512 frames",
               percent(column("found", trained_on="short", frames=512)), "%")),
    "overhead": (
        Figure("a step takes {} the plain loop's time", "1 micro-batch", column("ratio", micro_batches=1)),
        Figure("with 4 micro-batches {}", "4 micro-batches", column("ratio", micro_batches=4))),
    "partition": (
        Figure("a cut by parameters takes {} the exact cut's step", "by parameters",
               column("to_exact", question="replay", frozen="nothing", method="parameters"), " ×",
               f"42.2 days beside 29.0 of the balanced cut, {OMNI}, table 4"),
        Figure("by layers {}", "by layers", column("to_exact", question="replay", frozen="nothing", method="layers"),
               " ×", "30.6 beside 29.0"),
        Figure("{} published figures agree", "published that agree, %", figures.agreeing, share=True)),
    "plan_accuracy": (
        Figure("what autograd keeps of a stage is {} off", "kept bytes, % off",
               percent(column("saved_error", mode="memory")), "%"),
        Figure("live bytes of a stage are {} off", "live bytes, % off",
               percent(column("live_error", mode="memory")), "%"),
        Figure("seconds of a step {}", "step, % off", percent(column("error", mode="time")), "%")),
    "preferences": (
        Figure("a step of DPO takes {} one of fine-tuning on the same tokens", "DPO over fine-tuning",
               column("beside_sft")),
        Figure("and {} the time of TRL's DPOTrainer on the same pairs", "over TRL's", column("beside_trl")),
        Figure("{} where TRL is given the reference too", "over TRL's, reference given", column("beside_trl_cached"))),
    "published": (
        Figure("simulated, the held-out cells of Qwen2.5-VL-32B are {} off", "18 cells, % off",
               percent(column("error", group="18 cells", role="held_out")), "%", f"the cells themselves, {RAY}"),
        Figure("steps of Ulysses and 2D {}", "LongVILA's steps, % off",
               percent(column("error", group="sequence parallel", role="held_out")), "%", f"{LONG}, tables 2, 8"),
        Figure("days {}", "OmniBal's days, % off",
               percent(column("error", group="chain of rows", role="held_out")), "%", f"{OMNI}, tables 4, 7")),
    "reading": (
        Figure("one process reads pictures of 12 million pixels {} as fast as torch's DataLoader", "12 million pixels",
               column("dhp_over_loader", kind="large")),
        Figure("those of 1.2 million {}", "1.2 million", column("dhp_over_loader", kind="middle")),
        Figure("small ones {}", "small ones", column("dhp_over_loader", kind="small")),
        Figure("eight frames of a video {}", "videos", column("dhp_over_loader", kind="video"))),
    "recompute": (
        Figure("recompute=auto is {} as fast as recomputing everything", "auto",
               column("auto_vs_full", mode="speed", plan="auto, selected operations")),
        Figure("whole layers alone {}", "whole layers",
               column("auto_vs_full", mode="speed", plan="auto, whole layers"))),
    "sight": (
        Figure("on combinations that training never had, {} of the answers are exact with right pictures",
               "right pictures", figures.seen("right"), ""),
        Figure("with exchanged ones they are {} off chance", "exchanged, points", figures.seen("exchanged"), " points"),
        Figure("{} answers of plain transformers are the same", "exported, %", figures.same, share=True),
        Figure("losses of layouts are {} off one actor's", "layouts", column("off", what="layout"), "")),
    "stages_on_off": tuple(
        Figure(f"{way}: held-out loss on long videos {{}}", way, figures.held_out(way), "")
        for way in ("all stages", "without 3", "without 4", "without 3 and 4")
    ),
    "text_ratio": (
        Figure("with one pass of the tower a step, efficiency with even pictures is {}", "one pass, even",
               percent(column("efficiency", way="whole step", how="wall", even=True)), "%",
               "90% of text-only efficiency, Kimi K2.5"),
        Figure("with uneven ones {}", "one pass, uneven",
               percent(column("efficiency", way="whole step", how="wall", even=False)), "%"),
        Figure("with a pass a micro-batch {}", "a pass a micro-batch",
               percent(column("efficiency", way="sequential", how="wall")), "%")),
    "throughput": (
        Figure("by dry runs TP takes {} SP+TP's step of a sample", "TP over SP+TP, planned",
               ratio("patches_s", {"layout": "SP+TP", "device": "plan"}, {"layout": "TP", "device": "plan"}, ("size",)),
               " ×", f"1.26 to 1.37 × on 8 H100, {RAY}"),),
    "two_hosts": (
        Figure("with slow links a ring takes {} as long as 2D attention", "ring over 2D",
               column("ring_over_2d", direction="both")),
        Figure("Ulysses {}", "Ulysses over 2D", column("ulysses_over_2d", direction="both"))),
}  # fmt: skip
