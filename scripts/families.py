"""Write docs/reference/families.md: every family of transformers for image and text, and what of it works here.

`python -m scripts.families` examines each by `dhp.doctor`: by a tiny configuration of the tests (dhp/tiny/
tiny_families.py for declared families, tests/helpers/undeclared_families.py for others), or else by the defaults of its
configuration class, made small. Each runs in a process of its own, as some take more memory than there is. What was
found is kept in results/families.jsonl; names as arguments are examined anew, and without any all that the file lacks:
after an update of transformers, those that came with it. --came only names them and those that went, --page only
writes the page."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FOUND, PAGE = ROOT / "results" / "families.jsonl", ROOT / "docs" / "reference" / "families.md"
LIMIT_S = 300
MEMORY = 12 << 30  # bytes of a process that examines one
LAYOUTS = ("data", "sequence", "tensor"), ("data", "sequence", "tensor", "pipeline")

HEAD = """\
# Model families

What dhp does with each family that transformers {version} loads for image and text. Made by
`python -m scripts.families`; ask about your own model with `python -m dhp doctor model PATH`, which needs its
config.json alone.

- **tested**: the layout is in the matrix of `make test ARGS='-m families'`: loss, every gradient and three optimizer
  steps equal the plain model's, with packed and with padded rows.
- **works**: a tiny model of the family, trained by the trainers of its parts in one process, equals the whole model in
  loss and every gradient to 1e-9, packed and padded; and every check that a run makes before it starts lets the layout
  through. That layout itself is not in a test.
- **—**: refused by name before a run starts; the last column or the doctor says why.

"Published as" is the checkpoint that transformers' configuration of the type names, with its size; of a type made after
another it may be that one's. Others of the type are trained in the same way.

All parts may also have `none` (one actor) and `deepspeed` (replicas with ZeRO). Vision by `sequence`: "by token" where
a picture itself is divided, by Ulysses, ring or both; for all other families its actors share whole pictures. Text by
`sequence`: every row is divided, by Ulysses, ring or both; where tokens of an image see each other both ways, by
Ulysses alone.

`qwen3_5` is the type of Qwen3.6 and Qwen3.8 too (as of their 27B), and `qwen3_5_moe` that of those with experts.

Decoders with layers of a kind that dhp does not know (sparse attention by an index, Mamba, convolutions with state of
their own) run each sample of a row alone, through transformers' own code: packed rows equal padded ones and save no
time, and no row is shared. A run says so when it starts. `inkling_mm_model` is one of them where scipy is installed.

`qwen3_omni_moe_thinker` has a third part, its audio tower: `audio` with `data` and `sequence` is tested with all of
the below; so have `qwen2_5_omni_thinker` and `gemma4`, with `data` and `sequence`. Without a section `audio` a run
leaves it as it is ([data.md](../data.md#sound)). The audio towers of other families stay as they are, and their sound
is not read.
"""


HEARS = ("gemma4",)  # examined as they are without sound; tests/engine/test_whole_clips.py has them with it


def main(names: Sequence[str]) -> None:
    """Examine what is asked for, or what is not known yet, and write the page."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    known = read_found() if FOUND.exists() else {}
    every = sorted(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    if list(names) == ["--came"]:
        print(came(known, every))
        return
    asked = [] if list(names) == ["--page"] else names or [name for name in every if name not in known]
    for name in asked:
        known[name] = {"name": name, **_examine(name)}
        print(name, json.dumps(known[name])[:160], flush=True)
        FOUND.write_text("".join(json.dumps(known[one]) + "\n" for one in sorted(known)))
    PAGE.write_text(page(known, every))


def came(known: Collection[str], every: Collection[str]) -> str:
    """What the installed transformers has that was not examined yet, and the other way round."""
    import transformers

    new, gone = sorted(set(every) - set(known)), sorted(set(known) - set(every))
    return (
        f"transformers {transformers.__version__}: came {', '.join(new) or 'none'}; went {', '.join(gone) or 'none'}. "
        "`python -m scripts.families` examines what came"
    )


def read_found() -> dict[str, dict[str, Any]]:
    """What results/families.jsonl has, by name."""
    return {one["name"]: one for one in map(json.loads, FOUND.read_text().splitlines())}


def _examine(name: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "scripts.families", "--one", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, cwd=ROOT, check=False)
    except subprocess.TimeoutExpired:
        return {"why": f"its small model took more than {LIMIT_S} s, so nothing is known of it here"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        return {
            "why": f"its small model could not be examined: {(done.stderr.strip().splitlines() or ['?'])[-1][:200]}"
        }
    return json.loads(lines[-1])


def _one(name: str) -> None:
    """In a process of its own: print what is found."""
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    from transformers import CONFIG_MAPPING

    from dhp.doctor.diagnose import examine
    from dhp.models.families.grid import GridTower
    from dhp.models.registry import load_family
    from tests.helpers.tiny_families import FAMILIES
    from tests.helpers.undeclared_families import UNDECLARED

    cases = [case for case, (model_type, _) in FAMILIES.items() if model_type == name]
    arguments = FAMILIES[cases[0]][1] if cases else UNDECLARED.get(name, (name, {}))[1]
    with tempfile.TemporaryDirectory() as folder:
        CONFIG_MAPPING[name](**arguments).save_pretrained(folder)
        found = json.loads(examine(folder).as_json())
        by_token = bool(found["trainable"]) and isinstance(load_family(folder).tower, GridTower)
    print(json.dumps({**found, "declared": bool(cases), "by_token": by_token}))


def page(known: Mapping[str, dict[str, Any]], every: Sequence[str]) -> str:
    """docs/reference/families.md of what is known of these families."""
    import transformers

    found, unknown = [known[name] for name in every if name in known], [name for name in every if name not in known]
    works = [one for one in found if one.get("trainable")]
    declared = [one for one in works if one.get("declared")]
    lines = [HEAD.format(version=transformers.__version__)]
    lines.append(f"{len(declared)} of {len(found)} families are declared and tested, {len(works)} can be trained.\n")
    text = ("text: data", *LAYOUTS[1][1:])
    columns = ("family", "vision: data", "sequence", "tensor", *text, "packed", "videos", "sound", "published as")
    lines += [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    lines += [_row(one) for one in works]
    lines.append("\n## Not trained here, and why\n")
    lines += [f"- `{one['name']}`: {_reason(one)}" for one in found if not one.get("trainable")]
    if unknown:
        lines.append(f"\n## Not examined yet\n\n{', '.join(f'`{name}`' for name in unknown)}")
    return "\n".join(lines) + "\n"


def _row(one: dict[str, Any]) -> str:
    cells = []
    for part, layouts in zip(("vision", "text"), LAYOUTS, strict=True):
        for layout in layouts:
            shown = "—" if layout not in one[part] else "tested" if one["declared"] else "works"
            by_token = (part, layout) == ("vision", "sequence") and one.get("by_token")
            cells.append(f"{shown}, by token" if by_token else shown)
    packed = "equal" if one["packed_error"] is not None and one["packed_error"] <= 1e-9 else "differ: refused"
    name = f"**`{one['name']}`**" if one["declared"] else f"`{one['name']}`"
    videos = "—" if "video" in one["refused"] else "tested" if one["declared"] else "works"
    hears = one.get("audio") or one["name"] in HEARS
    sound = "—" if not hears else "tested" if one["declared"] else "works"
    return f"| {name} | {' | '.join(cells)} | {packed} | {videos} | {sound} | {published(one['name'])} |"


def published(name: str) -> str:
    """The checkpoint that the library's configuration of this type names; — where it names none."""
    from transformers import CONFIG_MAPPING

    found = re.findall(r"huggingface\.co/((?!papers/|docs/)[\w.-]+/[\w.-]+)", CONFIG_MAPPING[name].__doc__ or "")
    return found[0] if found else "—"


def _reason(one: dict[str, Any]) -> str:
    if "why" in one:
        return one["why"]
    refused = one["refused"]
    why = refused.get("family") or refused.get("padded rows") or "; ".join(refused.values())
    wanted = re.search(r"can't allocate memory: you tried to allocate (\d+) bytes", why)
    if wanted:  # of the machine that looked, and nothing about the family
        return (
            f"its small model asked for {int(wanted[1]) / 2**30:.1f} GiB at once, and the process that examined it may "
            f"take {MEMORY >> 30} GiB in all, so nothing is known of it here"
        )
    return " ".join(why.replace(f"model_type '{one['name']}': ", "").split())[:400]


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        _one(sys.argv[2])
    else:
        main(sys.argv[1:])
