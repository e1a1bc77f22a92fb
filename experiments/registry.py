"""Every experiment: its question, how long it takes, the arguments of a full and of a quick run, what it needs."""

import shlex
from dataclasses import dataclass

ROWS, PICTURE = "{rows}", "{picture}"  # stand for files in arguments


@dataclass(frozen=True)
class Experiment:
    """full: the command lines whose rows belong together in results/; quick: of a short run, None where there is none.

    minutes, quick_minutes: about, on two idle cores. processes: that it keeps at work at once by itself; a load as high
    as theirs is its own. needs: what a machine has to have besides. file: of results/, where it has another name.
    draws: arguments with which the experiment draws its own picture of rows in a file."""

    name: str
    question: str
    minutes: float
    full: tuple[str, ...] = ("",)
    quick: str | None = None
    quick_minutes: float = 0.5
    processes: int = 2
    needs: str = ""
    file: str = ""
    draws: str = ""

    @property
    def result(self) -> str:
        """The name of its file in results/."""
        return self.file or self.name

    def commands(self, quick: bool) -> list[list[str]]:
        """Arguments of each command line of a run."""
        lines = [self.quick or ""] if quick else self.full
        return [shlex.split(line) for line in lines]


_LINKS = "--sizes 1k 4k --shapes vision-dominated --rounds 1 --only ddp DP SP+TP TP --links"
_LARGE = "--sizes 1k 4k --shapes 'as 32B' --rounds 2 --only SP+TP TP --links"
_LONG = (
    *("longest", "longest_prompt", "video", f"sampler --plot {PICTURE}"),
    *("long_sets", "schedule", "two_stages", "steps"),
)

EXPERIMENTS = (
    Experiment("balance", "How evenly can samples be put into packs and steps?", 1, quick="--dp 8", processes=1),
    Experiment("beside_trl", "The same training by dhp, a plain loop and TRL: the same losses, and how fast?", 60,
        ("--trained DIR", "--trained DIR --answers 200"), processes=4,
        needs="the folder of make example: --trained DIR; trl 1.16.0"),
    Experiment("chaos", "What does a run keep of itself when it is killed, cut off, damaged?", 60,
        ("--points", "--runs 20", "--partition"), "--points put_aside.before", 0.7, 4, "root, for the link that is cut",
    ),
    Experiment("convergence", "Does a model learn as well from balanced packs and a split tower?", 90,
        ("", "--methods bytes_18 bytes_16 bytes_12 bytes_10 --save-steps 48"),
        "--methods random balanced --seeds 0 --epochs 2 --samples 32 --held-out 16 --save-steps 4", 1, 4,
        draws=f"--seeds --read {ROWS} --plot {PICTURE}"),
    Experiment("driver_scale", "What does a step cost the driver and Ray, by ranks and routes?", 20,
        ("--ranks 8 16 32 64 --rounds 7", "--ranks 128 256 --rounds 3"), "--ranks 8 --rounds 1", processes=4),
    Experiment("families", "Is a step of each declared family faster than the usual loop's with padded rows?", 35,
        ("--rounds 5",), "--rounds 1 --only qwen2_vl", 1, 1, file="families_speed"),
    Experiment("finetuning", "What does a step save that trains some of a model?", 25, ("--rounds 15",),
        "--rounds 1 --only frozen"),
    Experiment("five_layouts", "Has a real training the same losses in every layout, also killed and resumed?", 20,
        ("--trained DIR",), processes=4, needs="the folder of make example: --trained DIR",
        draws=f"--read {ROWS} --plot {PICTURE}"),
    Experiment("gpu_check", "On one GPU: right kernels, step times, memory, waits?", 13, needs="a GPU", file="gpu"),
    Experiment("imbalance", "How uneven are tokens, time and memory of stages, replicas and steps?", 30,
        ("", "--training"), quick="--ways 'random batches' --steps 2", quick_minutes=0.8, processes=8,
        draws=f"--read {ROWS} --plot {PICTURE}"),
    Experiment("layout_choice", "Which layout when: by model, GPUs and length of a row?", 10,
        quick="--models 3b --devices 8 --tokens 4096", processes=1),
    Experiment("layouts", "How fast are dhp's layouts and their peers on the same work?", 60,
        ("--sizes 1k 4k --rounds 2 --steps 4", "--sizes 9k 16k --rounds 1 --steps 2", _LINKS, _LARGE),
        "--sizes 1k --shapes vision-dominated --rounds 1 --steps 1 --only ddp DP SP+TP TP", 1.6, 4,
        "root, for the slow links of its last commands"),
    Experiment("long_context", "How long may a row of the decoder be, and how fast are such rows?", 180,
        (*(f"--only {one}" for one in _LONG), "--only inference --tokens 8192 16384 32768 65536"), "--only sampler",
        processes=4),
    Experiment("longest_sequence", "How long an image fits into given bytes of activations, by layout?", 60,
        ("--budget-mib 128", "--recompute full --budget-mib 24"),
        "--ranks 1 2 --only SP+TP TP --budget-mib 24", 1, 4),
    Experiment("micro", "What do single parts of a step cost, each beside what it could be instead?", 45,
        (
            *(f"--only {one}" for one in ("kernels", "handoff", "tensor_host", "checkpoint", "experts")),
            "--only compile --rounds 15", "--only experts --tokens 32", "--only reading --rounds 9",
        ),
        "--only tensor_host experts --rounds 2", processes=4),
    Experiment("needle_frames", "Does training on longer videos find needles in longer ones?", 15,
        (f"--plot {PICTURE}", "--models longest --samples 16 --steps 2 --frames 1024 --needles 1"),
        "--models short --samples 16 --steps 2 --frames 8 16 --needles 1", 1, 4,
        draws=f"--seeds --read {ROWS} --plot {PICTURE}"),
    Experiment("overhead", "What do actors, refs and the split cost against a plain loop?", 10,
        ("--rounds 5", "--rounds 5 --micro-batches 4"), "--rounds 1"),
    Experiment("partition", "Where should a tower and a decoder be cut into one chain of stages?", 15,
        quick="--only published"),
    Experiment("plan_accuracy", "How near does a plan come to what a run takes?", 30,
        quick="--only memory --cases plain", processes=4),
    Experiment("preferences", "What does a step of DPO cost beside fine-tuning's and TRL's DPO?", 5,
        ("--rounds 9",), "--rounds 1", 1.5, 1),
    Experiment("published", "How near do counted operations and bytes come to published step times?", 1,
        (f"--plot {PICTURE}",), "", processes=1),
    Experiment("reading", "How many samples a second does one reader process make, and of what?", 8, processes=1,
        quick="--kinds small --samples 8 --rounds 1"),
    Experiment("recompute", "What does recompute=auto save with memory for half of the layers?", 8, ("--rounds 7",),
        quick="--rounds 1", quick_minutes=1.1),
    Experiment("sight", "Does a run learn from the picture, in every layout alike?", 90, processes=4),
    Experiment("stages_on_off", "What do stages 3 and 4 of a curriculum give on held-out samples?", 25,
        quick="--ways 'without 3 and 4' --steps 2 --last-steps 4 --samples 8", quick_minutes=0.8, processes=4),
    Experiment("text_ratio", "How much of its decoder's speed does a vision-language step have?", 30,
        quick="--rounds 1 --layouts 1+1 --pictures 4 --shares 0.3 --only even", quick_minutes=0.7, processes=4),
    Experiment("throughput", "How many patches a second, by layout and length of a picture?", 1,
        quick="--layouts SP+TP --sizes 1k", processes=1),
    Experiment("two_hosts", "With slow links between hosts: ring, Ulysses or both?", 15,
        ("--rounds 5",), "--rounds 1", 1.8, 4, "root, for hosts of network namespaces"),
)  # fmt: skip
BY_NAME = {one.name: one for one in EXPERIMENTS}
