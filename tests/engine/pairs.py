"""Which features of a layout each row of a table has, and which pairs of them cannot stand together.

Mistakes in layouts come where two features meet; those that take three are for `-m grid` and tests/fuzz. So what runs
before each merge is a table in which each pair meets once (tests/engine/pair_rows.py), held complete by
tests/engine/test_parity.py; `make test` has rows of it with each feature, `-m slow` the others."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, product

from tests.helpers.layouts import Case

Pair = frozenset[str]

DEEPSPEED, FSDP = ("zero 1", "zero 2", "zero 3"), ("fsdp 2", "fsdp 3")
SLICED, SEQUENCE = ("tensor", "autotp"), ("ulysses", "ring")
RECOMPUTE = ("light", "mlp", "linear", "offload", "all")
STAGED = ("gpipe", "1f1b", "interleaved")
# Of each axis a layout has one value, and may have none of those that are no choice.
AXES: dict[str, tuple[str, ...]] = {
    "model": ("windows", "tied", "whole images", "deepstack", "experts"),
    "dtype": ("float64", "float32", "bfloat16"),
    "schedule": ("sequential", "vision_ahead", *STAGED),
    "rows": ("packed", "padded"),
    "micro-batches": ("one", "several"),
    "recompute": tuple(f"recompute {kind}" for kind in RECOMPUTE),
    "vision states": tuple(f"vision {kind}" for kind in (*DEEPSPEED, *FSDP)),
    "text states": tuple(f"text {kind}" for kind in (*DEEPSPEED, *FSDP)),
}
# Of these it has any number.
OTHERS = (
    *(f"vision {axis}" for axis in ("data", "ulysses", "ring", "tensor", "stages")),
    *(f"text {axis}" for axis in ("data", "ulysses", "ring", "tensor", "autotp", "expert", "stages")),
    *("lora", "a frozen part", "some by pattern", "groups", "mlp chunks", "sharded norms", "padded MLPs"),
    "pictures of several",
)
# Weights that stay as they are show no mistake: rows with one of these count for its own pairs alone.
LEAVES = {"lora", "a frozen part", "some by pattern"}
FEATURES = (*OTHERS, *(value for values in AXES.values() for value in values))


@dataclass(frozen=True)
class Row:
    """A layout of a model of tests/engine/test_parity.py."""

    model: str
    case: Case

    def __str__(self) -> str:
        return f"{self.model}: {self.case}"


def features_of(row: Row) -> set[str]:
    """Of those above."""
    case = row.case
    found = {row.model, case.dtype, case.schedule, "packed" if case.packing else "padded"}
    found.add("several" if case.micro_batches > 1 else "one")
    for part, degrees, stage in (("vision", case.vision, case.zero_stage), ("text", case.text, case.text_zero_stage)):
        found |= {f"{part} {axis}" for axis in ("data", "ulysses", "ring", "expert") if getattr(degrees, axis) > 1}
        if degrees.tensor > 1:
            found.add(f"{part} autotp" if case.autotp and part == "text" else f"{part} tensor")
        if stage:
            found.add(f"{part} fsdp {stage}" if case.fsdp else f"{part} zero {stage}")
    again = "all" if case.checkpointing else case.recompute
    has = {
        f"recompute {again}": again != "none",
        "vision stages": case.tower_stages > 1,
        "text stages": case.stages > 1,
        "lora": bool(case.lora),
        "a frozen part": bool({"vision", "text"} & set(case.frozen)),
        "some by pattern": bool(case.trainable or set(case.frozen) - {"vision", "text"}),
        "groups": bool(case.groups),
        "mlp chunks": case.mlp_chunks > 1,
        "sharded norms": case.sharded_norms,
        "padded MLPs": case.padded,
        "pictures of several": case.vision_batch > 1,
    }
    return found | {name for name, it_has in has.items() if it_has}


def pairs_of(row: Row) -> set[Pair]:
    """Of features that a row holds together."""
    found = features_of(row)
    return {frozenset(pair) for pair in combinations(found, 2) if not found & LEAVES or set(pair) & LEAVES}


def shown_by(row: Row) -> set[str]:
    """Features of which a row would show a mistake."""
    found = features_of(row)
    return found & LEAVES or found


def wanted_pairs() -> set[Pair]:
    """All but those that cannot stand together."""
    return {frozenset(pair) for pair in combinations(FEATURES, 2)} - apart().keys()


def apart() -> dict[Pair, str]:
    """Pairs that cannot stand together, and why."""
    return {frozenset(pair): reason for pair, reason in _apart() if len(set(pair)) == 2}


def _apart() -> Iterator[tuple[tuple[str, str], str]]:
    for axis, values in AXES.items():
        for pair in combinations(values, 2):
            yield pair, f"one {axis} at a time"
    for part, own in (("vision", ("tensor",)), ("text", SLICED)):
        for kind in DEEPSPEED:
            yield (f"{part} {kind}", "float64"), "DeepSpeed has no float64"
            for slicing in own:
                yield (f"{part} {kind}", f"{part} {slicing}"), "DeepSpeed does not cut the states of slices"
        for schedule in ("vision_ahead", *STAGED):
            yield (f"{part} zero 3", schedule), "DeepSpeed's stage 3 loses gradients with two micro-batches on the way"
    for vision, text in (*product(DEEPSPEED, FSDP), *product(FSDP, DEEPSPEED)):
        yield (f"vision {vision}", f"text {text}"), "a Case has one engine for both parts; tests/fuzz has two"
    for kind in FSDP:
        yield (f"text {kind}", "text autotp"), "DeepSpeed's layers are not cut any further"
    for kind in DEEPSPEED:
        yield (f"text {kind}", "text expert"), "DeepSpeed cuts what all replicas hold alike"
    yield ("text expert", "text autotp"), "what DeepSpeed makes of layers with experts is not known to be exact"
    yield ("text autotp", "sharded norms"), "DeepSpeed's own layers sum over all tokens"
    for kind in ("text tensor", "text stages", "lora", *(f"text {axis}" for axis in SEQUENCE)):
        yield ("text autotp", kind), "DeepSpeed's own layers know none of it"
    for model in ("experts", "deepstack"):
        yield ("text autotp", model), "what DeepSpeed makes of its layers is not known to be exact"
    for model in set(AXES["model"]) - {"experts"}:
        yield ("text expert", model), "it has no experts"
    for model in ("whole images", "experts"):
        yield ("vision stages", model), "their towers take pictures whole, and are not divisible"
    yield ("vision stages", "text expert"), "the model with experts has such a tower"
    yield ("vision stages", "vision zero 3"), "DeepSpeed drops weights at the end of modules that stages leave early"
    for schedule in STAGED:
        yield (schedule, "text autotp"), "DeepSpeed's own layers are not cut into stages"
    yield ("vision_ahead", "text stages"), "it is 1f1b by another name, for a text part of one stage"
    yield ("pictures of several", "one"), "a pass of the tower has at most those of a step"
    yield ("interleaved", "one"), "it takes micro-batches in groups of as many as there are stages"
