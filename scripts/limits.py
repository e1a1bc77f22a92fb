"""Write docs/reference/limits.md: what is refused, and whether it cannot be, has an equivalent, or is not built.

`python -m scripts.limits` makes it of the rules between settings (dhp/config/rules.py) and of `OF_MODELS`, what the
checks of a model refuse; a test holds these to the messages in the code. Mistakes (a degree that does not divide, a
name that is none) are no limits, and are not in it."""

from __future__ import annotations

import re
from pathlib import Path

from dhp.config.rules import CANNOT, NOT_BUILT, OPTIMIZER_RULES, PART_RULES, RUN_RULES, Rule

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "limits.md"
TAKEN = "equivalent taken"

# What a model or a layout of one is refused for: what, words of the message, which kind, what instead.
OF_MODELS: tuple[tuple[str, str, str, str], ...] = (
    (
        "`vision.ring` of a tower that takes pictures whole",
        "whose tower takes each picture whole",
        TAKEN,
        "as `vision.ulysses`: its actors share pictures",
    ),
    ("`zero_stage` 1 or 2 of a part that trains nothing", "there are no gradients and states", TAKEN, "0"),
    (
        "`zero_stage=3` by DeepSpeed of a part that trains nothing",
        "cuts no weights that it does not train",
        CANNOT,
        "`zero_engine=fsdp`",
    ),
    (
        "`text.ring` of a decoder in which tokens of an image see each other both ways",
        "the ring computes causal attention",
        NOT_BUILT,
        "`text.ulysses`",
    ),
    (
        "shared rows of a decoder that runs each sample alone",
        "of which it is not known here how ranks share them",
        NOT_BUILT,
        "`text.data`, and where the family has them `tensor` and `pipeline`",
    ),
    (
        "shared rows with positions that turn by a row's length",
        "turn by the longest position of a row",
        NOT_BUILT,
        "another `rope_type`",
    ),
    (
        "shared rows with queries scaled by their place",
        "scales queries by their place in the row",
        NOT_BUILT,
        "one rank a row",
    ),
    (
        "shared rows of Ovis2",
        "tokens around an image take features that come with",
        NOT_BUILT,
        "`text.tensor`, `text.data`",
    ),
    (
        "shared rows, `pipeline`, `compile`, `mlp_chunks` with a load-balancing loss of experts",
        "a load-balancing loss",
        NOT_BUILT,
        "`output_router_logits=false`",
    ),
    (
        "`text.tensor` of a decoder without a plan",
        "its layers are of no kind for which one is known",
        NOT_BUILT,
        "`data`, or `deepspeed` with a `zero_stage`",
    ),
    (
        "`text.tensor` by styles of transformers' plan that are not proved here",
        "whether its gradients are exact in training",
        NOT_BUILT,
        "`data`, or `deepspeed` with a `zero_stage`",
    ),
    (
        "`text.tensor` of files with projections in one matrix",
        "as one matrix, of which each actor would read",
        NOT_BUILT,
        "`data`, or `deepspeed` with a `zero_stage`",
    ),
    (
        "`text.tensor` that does not divide heads, in attention of unusual layers",
        "that uneven shares of it are exact",
        NOT_BUILT,
        "a degree that divides them",
    ),
    (
        "`text.tensor` of experts in another form than gate and up in one matrix",
        "experts are cut here where each has",
        NOT_BUILT,
        "`text.expert`, `data`",
    ),
    (
        "`text.pipeline` of a decoder whose layers need more than the states before them",
        "need more than the states of the",
        NOT_BUILT,
        "`data` or `tensor`",
    ),
    (
        "bases whose weights are quantized (fp8, awq, mxfp4)",
        "its weights are quantized ({method})",
        NOT_BUILT,
        "the model in bfloat16; `lora.quantization=nf4` of a frozen decoder",
    ),
    ("`vision.tensor` of towers without a plan", "has no tensor-parallel plan of its tower", NOT_BUILT, "`sequence`"),
    (
        "`vision.pipeline` of towers that run as a whole",
        "tower alone are not known here",
        NOT_BUILT,
        "`data` or `sequence`",
    ),
    (
        "`vision.sequence_sharded_norms` of towers that run as a whole",
        "may be cut by tokens is not known",
        NOT_BUILT,
        "leave it out",
    ),
    (
        "`text.sequence_sharded_norms` of decoders that add features of pictures between layers",
        "adds features of pictures to",
        NOT_BUILT,
        "leave it out",
    ),
    ("`text.mlp_chunks` of MLPs that are routed by token types", "its MLPs take, for", NOT_BUILT, "1"),
    ("`mlp_chunks` of MLPs that are no modules", "no modules of their own", NOT_BUILT, "1"),
    (
        "`autotp` of families without a plan of the library, or with experts",
        "what DeepSpeed makes of this family's layers",
        NOT_BUILT,
        "`tensor`",
    ),
    ("`audio.tensor`, `audio.ring`", "its audio tower takes clips whole", NOT_BUILT, "`sequence`, `data`"),
    (
        "answers of decoders that run each sample alone, of PaliGemma and of Llama 4",
        "it can be trained, but not answer prompts",
        NOT_BUILT,
        "export, and generate with transformers",
    ),
    ("nf4 of experts and of mixers", "take their weights as numbers", CANNOT, "leave `lora.quantization` out"),
    ("features on disk of a tower with dropout", "its features are others each time", CANNOT, "a rate of 0"),
)

HEAD = """\
# Limits

What dhp refuses before a run starts, made by `python -m scripts.limits`. Each refusal names the values, the reason and
what to set instead. Which layouts a family has is in [families.md](families.md).

- **{cannot}**: by what it is, or by the library or the device that would do it.
- **{taken}**: something else does the same; it is taken, and a run says so when it starts.
- **{built}**: nobody has built it here.

Of 740 random layouts of all families 530 are accepted and 44 by an equivalent, 20 are refused as what {cannot}, 96 as
{built}, and 50 as what means nothing, like more runs of layers than layers (`python -m tests.fuzz.refusals --draws=740
--seed=7004`, which prints each reason). What families are known to refuse is drawn as well, but for stages of a tower
that runs as a whole.
"""


def page() -> str:
    """docs/reference/limits.md."""
    lines = [
        HEAD.format(cannot=CANNOT, taken=TAKEN, built=NOT_BUILT),
        "## Of models\n",
        "| what | | instead |",
        "|---|---|---|",
    ]
    lines += [f"| {what} | {kind} | {instead} |" for what, _, kind, instead in OF_MODELS]
    lines += ["\n## Between settings\n", "PART is `vision`, `audio` or `text`.\n", "| settings | | why, and instead |"]
    lines += ["|---|---|---|", *(_row(rule) for rule in (*PART_RULES, *RUN_RULES, *OPTIMIZER_RULES))]
    return "\n".join(lines) + "\n"


def _row(rule: Rule) -> str:
    keys = ", ".join(f"`{key}`" for key in rule.keys.replace("{name}", "PART").split())
    says = re.sub(r"\{[pc]\.([a-z_.]+)\}", r"\1", rule.says.replace("{name}", "PART")).lstrip(":, ").replace("|", "\\|")
    return f"| {keys} | {rule.limit} | {says[:1].upper()}{says[1:]} |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
