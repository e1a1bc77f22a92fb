"""`dhp compose vision=MODEL text=MODEL out=DIR [seed=0] [projector=FILE]`: a LLaVA of any tower and any decoder."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from dhp.cli.common import make_parser
from dhp.core.errors import ConfigError
from dhp.core.text import did_you_mean, harmless, nearest, shell_command

KEYS = ("vision", "text", "out", "seed", "projector")


def main(arguments: Sequence[str]) -> int:
    """compose: put a vision tower and a text decoder together as a LLaVA, and write it as a Hugging Face directory.

    vision=MODEL: a directory or hub id of CLIP, SigLIP, DINOv2, ViT or the like. text=MODEL: of Llama, Qwen2, Qwen3,
    Mistral or the like. Their weights are taken as they are. The projector between them is new: its weights are random,
    by seed=0, so that it has to be trained first; or those of projector=FILE.safetensors (linear_1.weight and so on, as
    LLaVA names them). out=DIR: a new directory, which `dhp doctor model`, `dhp train` and
    transformers' AutoModelForImageTextToText and AutoProcessor take as any other."""
    parser = make_parser("compose", main.__doc__)
    parser.add_argument("settings", nargs="+", metavar="key=value", help=", ".join(f"{key}=" for key in KEYS))
    vision, text, out, seed, projector = _read(parser.parse_args(arguments).settings)
    from dhp.models.compose import compose  # it imports torch and transformers

    made = compose(vision, text, out, seed, projector)
    counts = ", ".join(f"{part} {count:,}" for part, count in made.parameters.items())
    weights = f"of {projector}" if projector else "random, and are to be trained"
    print(f"{made.folder}: a LLaVA of {counts} parameters; the projector's are {weights}")
    print(f"a picture of {made.side} × {made.side} pixels becomes {made.image_tokens} tokens {made.image_token}")
    print(f"layouts that it can be trained in: {shlex.join(shell_command('doctor', 'model', str(made.folder)))}")
    return 0


def _read(settings: Sequence[str]) -> tuple[str, str, Path, int, Path | None]:
    given: dict[str, str] = {}
    for one in settings:
        key, sign, value = one.partition("=")
        if key not in KEYS or not sign:
            raise ConfigError(f"{harmless(one)} is no setting of compose{did_you_mean([nearest(key, KEYS)])}")
        given[key] = value
    missing = [f"{key}=" for key in KEYS[:3] if not given.get(key)]
    if missing:
        raise ConfigError(f"{', '.join(missing)} is missing: dhp compose vision=MODEL text=MODEL out=DIR")
    seed = given.get("seed", "0")
    if not seed.isdecimal():
        raise ConfigError(f"seed={harmless(seed)} is no whole number from 0")
    projector = Path(given["projector"]).expanduser() if given.get("projector") else None
    return given["vision"], given["text"], Path(given["out"]).expanduser(), int(seed), projector
