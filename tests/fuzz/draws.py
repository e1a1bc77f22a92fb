"""Random layouts of random families: what `pytest -m fuzz` tries."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, product

from tests.helpers.tiny_families import FAMILIES

# By what of a family has met with defects of layouts: each kind comes equally often, however many families it has.
KINDS = {
    "state along the row": ("qwen3_5", "qwen3_5_moe"),
    "head tied": ("gemma3", "gemma3", "gemma3", "paligemma2", "gemma4"),
    "hears": ("qwen3_omni",),
    "pictures of many shapes": ("llava_next", "llava_onevision", "llava_pixtral", "mistral3", "minicpmv4_6"),
    "tower by patch": ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v", "glm46v", "kimi_k25"),
    "experts": ("qwen3_vl_moe", "glm4v_moe", "gemma4_moe", "ernie4_5_vl_moe", "deepseek_vl_hybrid"),
}
KINDS = {kind: tuple(name for name in names if name in FAMILIES) for kind, names in KINDS.items()}
_NAMED = {name for names in KINDS.values() for name in names}
KINDS["pictures of one shape"] = tuple(name for name in FAMILIES if name not in _NAMED)
STATES = ("whole", "deepspeed 1", "deepspeed 2", "deepspeed 3", "fsdp 2", "fsdp 3")
BY_RANKS = ("data", "data", "data", "tensor", "ulysses", "ring", "none", "data and tensor", "ring and ulysses")
WITH_ROWS = ("data and ulysses", "data and ring")  # of families with experts, which replicas share out
WORLDS = {"none": 1} | dict.fromkeys(("data", "tensor", "ulysses", "ring"), 2)
WORLDS |= dict.fromkeys(("data and tensor", "ring and ulysses", *WITH_ROWS), 4)
HAVE_EXPERTS = {"qwen3_vl_moe", "qwen3_5_moe", "glm4v_moe", "gemma4_moe", "kimi_k25", "ernie4_5_vl_moe", "qwen3_omni"}
# Families between whose layers states cannot be cut by tokens.
WHOLE_STATES = {
    "text": {"gemma4", "gemma4_moe"},
    "vision": {name for name in FAMILIES if name not in KINDS["tower by patch"]} | {"kimi_k25"},
}
RULES = (
    ("training.frozen=[]",),
    ("training.frozen=[embed_tokens]",),
    ("training.frozen=[vision]",),
    ("training.trainable=[projector]",),
    ("vision.lora.rank=2", "text.lora.rank=2"),
    ("text.lora.rank=2", "training.frozen=[]"),
    ("vision.lora.rank=2", "text.lora.rank=2", "vision.lora.dora=true", "text.lora.dora=true"),
    ("text.lora.rank=2", "text.lora.dropout=0.3", "training.frozen=[embed_tokens]"),
)
GROUPS = (
    (),
    (),
    ("+training.groups.vision={learning_rate: 1e-5, warmup_steps: 2}",),
    ("+training.groups.text={learning_rate: 1e-4, weight_decay: 0.3}", "+training.groups.projector={warmup_steps: 1}"),
    ("+training.groups.light={parameters: ['*norm*', '*bias'], weight_decay: 0.0}",),
)
SAMPLES = 4  # of a step
ONWARD = 1 / 3  # of the draws go on in another layout


@dataclass(frozen=True)
class Draw:
    """A layout. axes: its value on each axis, for the table of what met what. onward: of the layout in which the run
    goes on behind its first step; none: in the same."""

    family: str
    kind: str
    axes: dict[str, str]
    overrides: tuple[str, ...]
    data_seed: int
    onward: tuple[str, ...] = ()

    @property
    def dtype(self) -> str:
        """DeepSpeed has no float64."""
        cut = any("deepspeed" in self.axes[f"{part} states"] for part in ("vision", "text", "audio"))
        return "float32" if cut or any("zero_engine=deepspeed" in one for one in self.onward) else "float64"


def draws(seed: int, unbuilt: bool = False) -> Iterator[Draw]:
    """Without end. Each kind meets each way of keeping states, of either part, once in as many draws as there are
    pairs. unbuilt: what families are known to refuse is drawn as well, to count it, but for stages of a tower that runs
    as a whole, which would be half of all."""
    rng = random.Random(seed)
    while True:
        vision, text = ([*product(KINDS, STATES)] for _ in range(2))
        rng.shuffle(text)
        of_vision = {kind: _endless(rng, [states for own, states in vision if own == kind]) for kind in KINDS}
        for kind, states in text:
            yield _draw(rng, kind, next(of_vision[kind]), states, unbuilt)


def _endless(rng: random.Random, values: list[str]) -> Iterator[str]:
    rng.shuffle(values)
    return cycle(values)


def _draw(rng: random.Random, kind: str, vision_states: str, text_states: str, unbuilt: bool) -> Draw:
    family = rng.choice(KINDS[kind])
    axes = _axes(rng, kind, family, vision_states, text_states, unbuilt)
    rules = rng.choice(RULES)
    axes["trains"] = " ".join(rule.partition(".")[2] for rule in rules)
    groups = rng.choice(GROUPS)
    axes["groups"] = " ".join(group.partition("groups.")[2].partition("=")[0] for group in groups) or "none"
    able = not any("deepspeed" in axes[f"{part} states"] for part in ("vision", "text", "audio"))
    axes["optimizer"] = rng.choice(("adamw", "adamw", "muon", "adafactor")) if able else "adamw"
    axes["rate"] = rng.choice(("constant", "linear", "cosine"))
    more = (f"training.optimizer={axes['optimizer']}", f"training.lr_scheduler_type={axes['rate']}", *groups)
    onward: tuple[str, ...] = ()
    if rng.random() < ONWARD:
        states = STATES if axes["optimizer"] == "adamw" else [one for one in STATES if "deepspeed" not in one]
        onward = (*_overrides(_axes(rng, kind, family, rng.choice(states), rng.choice(states), unbuilt)), *rules, *more)
    axes["goes on"] = "elsewhere" if onward else "there"
    return Draw(family, kind, axes, (*_overrides(axes), *rules, *more), rng.randrange(3), onward)


def _axes(
    rng: random.Random, kind: str, family: str, vision_states: str, text_states: str, unbuilt: bool
) -> dict[str, str]:
    """Of a layout, without what is the recipe's."""
    axes = {"vision states": vision_states, "text states": text_states}
    axes["vision ranks"] = _ranks(rng, vision_states)
    axes["text ranks"], axes["experts"] = _ranks(rng, text_states), "whole"
    if family in HAVE_EXPERTS and "deepspeed" not in text_states and rng.random() < 0.7:
        axes["text ranks"], axes["experts"] = rng.choice(("data", *WITH_ROWS, "data and tensor")), "shared out"
    axes["stages"] = rng.choice(("1", "2") if kind == "head tied" else ("1", "1", "2"))
    divisible = kind == "tower by patch" and vision_states != "deepspeed 3"
    axes["tower stages"] = rng.choice(("1", "2", "2")) if divisible else "1"
    alike = WORLDS[axes["vision ranks"]] == WORLDS[axes["text ranks"]]  # as a chain has them
    axes["chain"] = rng.choice(("yes", "yes", "no")) if axes["tower stages"] == "2" and alike else "no"
    schedules = ("sequential", "vision_ahead") if axes["stages"] == "1" else ("1f1b", "gpipe", "interleaved")
    axes["schedule"] = "sequential" if "deepspeed 3" in (vision_states, text_states) else rng.choice(schedules)
    axes["rows"] = rng.choice(("packed", "packed", "packed", "padded"))
    axes["micro-batches"] = rng.choice(("1", "2", "2"))
    for part in ("vision", "text"):
        axes[f"{part} recompute"] = rng.choice(("none", "none", "full", "mlp", "light"))
    axes["mlp_chunks"] = rng.choice(("1", "1", "2")) if unbuilt or axes["experts"] == "whole" else "1"
    for part in ("vision", "text"):
        able = "tensor" in axes[f"{part} ranks"] and (unbuilt or family not in WHOLE_STATES[part])
        axes[f"{part} norms"] = rng.choice(("sharded", "whole")) if able else "whole"
    hears = kind == "hears"
    axes["audio states"] = rng.choice(STATES) if hears else "no such part"
    whole = hears and axes["audio states"] == "whole"
    axes["audio stages"] = rng.choice(("1", "2", "2")) if whole else "1" if hears else "no such part"
    cut = "2" in (axes["stages"], axes["tower stages"])
    axes["partition"] = rng.choice(("bmp", "parameters")) if cut else "null"
    axes["pictures of"] = rng.choice(("a micro-batch", "a step"))
    return axes


def _ranks(rng: random.Random, states: str) -> str:
    """Whose states are sharded has replicas mostly, which is what they are sharded over. DeepSpeed's have no slices."""
    if states != "whole" and rng.random() < 0.7:
        return "data"
    return rng.choice([ranks for ranks in BY_RANKS if "deepspeed" not in states or "tensor" not in ranks])


def _overrides(axes: dict[str, str]) -> Iterator[str]:
    for part in ("vision", "text"):
        stages = int(axes["stages" if part == "text" else "tower stages"])
        yield from _part(part, axes[f"{part} ranks"], axes[f"{part} states"], stages)
        yield f"{part}.recompute={axes[f'{part} recompute']}"
        yield f"{part}.sequence_sharded_norms={str(axes[f'{part} norms'] == 'sharded').lower()}"
    if axes["audio states"] in STATES:
        states, stages = axes["audio states"], int(axes["audio stages"])
        yield from _part("audio", "none" if states == "whole" else "data", states, stages)
    yield f"text.expert={2 if axes['experts'] == 'shared out' else 1}"
    yield f"text.partition={axes['partition']}"
    yield f"cluster.chain={str(axes['chain'] == 'yes').lower()}"
    yield f"text.mlp_chunks={axes['mlp_chunks']}"
    if axes["schedule"] == "interleaved":
        yield "text.virtual_stages=2"
    replicas, micro = 2 if "data" in axes["text ranks"] else 1, int(axes["micro-batches"])
    yield f"training.schedule={axes['schedule']}"
    yield f"training.vision_batch={'null' if axes['pictures of'] == 'a step' else 1}"
    yield f"data.packing={str(axes['rows'] == 'packed').lower()}"
    yield f"training.batch_size={SAMPLES}"
    yield f"training.micro_batch_size={SAMPLES // (replicas * micro)}"


def _part(part: str, ranks: str, states: str, stages: int) -> Iterator[str]:
    axes = [] if ranks == "none" else ranks.split(" and ")
    degrees = dict.fromkeys(axes, 2)
    parallelism = "sequence" if {"ulysses", "ring"} & degrees.keys() else axes[-1] if axes else "none"
    actors = stages
    for name, degree in degrees.items():
        actors *= degree
        yield f"{part}.{name}={degree}"
    yield f"{part}.num_actors={actors}"
    if stages > 1:
        yield f"{part}.pipeline={stages}"
        parallelism = "pipeline" if ranks == "none" else parallelism
    engine, _, stage = states.partition(" ")
    yield f"{part}.parallelism={parallelism}"
    yield f"{part}.zero_stage={stage or 0}"
    if stage:
        yield f"{part}.zero_engine={engine}"


def count_met(tried: Sequence[Draw]) -> str:
    """A table: how often each value of each axis met each kind of family."""
    kinds = list(KINDS)
    lines = [f"{'':34}" + "  ".join(kinds)]
    for axis in tried[0].axes if tried else ():
        for value in sorted({draw.axes[axis] for draw in tried}):
            met = [sum(draw.kind == kind and draw.axes[axis] == value for draw in tried) for kind in kinds]
            cells = "  ".join(f"{count:>{len(kind)}}" for count, kind in zip(met, kinds))
            lines.append(f"{axis + ' ' + value:34}{cells}")
    return "\n".join(lines)
