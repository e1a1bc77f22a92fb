"""`dhp recipe [FAMILY|MODEL] [devices=8] [device=h100] [out=FILE.yaml]`: a ready configuration of a model."""

import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from dhp.cli.common import make_parser
from dhp.cli.plan import FITS, NOTHING_FITS, layout_settings, nested_yaml
from dhp.cli.plan_outcome import Outcome, PlanQuery, find_plan
from dhp.cli.plan_request import PlanRequest, read_request
from dhp.config.command_line import compose_config
from dhp.config.devices import GIB, NODE
from dhp.config.layout import DEGREES
from dhp.config.parts import model_name, parts
from dhp.config.schema import Config, PartConfig
from dhp.core.errors import ConfigError
from dhp.core.files import write_whole
from dhp.core.process import StartUp, heed, say_line
from dhp.core.text import aligned, did_you_mean, nearest, shell_command
from dhp.models.pretrained import shapes_directory
from dhp.plan.search.free_keys import find_held

COUNTS = (1, 2, 4, 8, 16, 32, 64)  # devices that are tried where none are named
_STATES = 18  # bytes a parameter: weights, gradients and optimizer of bfloat16 with float32 weights
_SIZE = re.compile(r"(\d+(?:\.\d+)?b)(-a\d+b)?(?=-|$)")
_DEFAULTS = "defaults:\n  - data: llava\n  - _self_\n\n"
# What a recipe sets beside the model and its layout.
_TRAINING: Mapping[str, Any] = {
    "vision.dtype": "bfloat16",
    "text.dtype": "bfloat16",
    "data.balance": "balanced",
    "data.limits.text": 8192,
    "data.limits.vision": 8192,
    "data.num_workers": 4,
    "training.batch_size": 64,
    "training.micro_batch_size": 1,
    "training.learning_rate": 1e-5,
    "training.lr_scheduler_type": "cosine",
    "training.warmup_ratio": 0.03,
    "training.max_grad_norm": 1.0,
}


def main(arguments: Sequence[str]) -> int:
    """recipe: write a configuration that trains all of a model in bfloat16, with the layout that `dhp plan` finds
    fastest on the fewest devices that surely hold it. Alone it lists the published models whose shapes dhp ships.

    FAMILY or MODEL: a family, as internvl (its smallest model), a name of the list, a hub id of it, or a model's
    directory. devices=8 (or nodes x devices, 2x8) device=h100, also length=, lengths=, memory_gib= and reserve=: as
    `dhp plan` takes them. out=FILE.yaml: where to; else it is printed. Your data go into its data.data_registry.

    The exit status is 0 where a layout fits, 1 for bad input, 3 where nothing fits."""
    parser = make_parser("recipe", main.__doc__)
    parser.add_argument("model", nargs="?", help="a family, a published model, or a model's directory")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="devices=, device=, out= and so on")
    given = parser.parse_intermixed_args(arguments)
    heed()
    if given.model is None:
        rows = [("name", "family", "model"), *((name, *of) for name, of in published().items())]
        print("\n".join(aligned(rows, left=3)))
        return FITS
    out, request = _read(given.settings)
    name, model = find_model(given.model)
    say = StartUp(time.perf_counter(), partial(say_line, file=sys.stderr))
    outcome = plan_model(name, model, request, say)
    if outcome.best is None:
        tried = outcome.machine if request.devices is not None else f"{COUNTS[-1]} × {outcome.machine.name}"
        print(f"{model}: no layout fits {tried}; name more or larger ones by devices= and device=")
        return NOTHING_FITS
    text = recipe_text(name, outcome)
    if out is None:
        print(text, end="")
        return FITS
    out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(out, text)
    print(f"{out}: {_fits_on(outcome)}. Name your data in it, and see what it takes before it is started:")
    print(f"{' '.join(shell_command('train', str(out)))} training.dry_run=true")
    return FITS


def _read(settings: Sequence[str]) -> tuple[Path | None, PlanRequest]:
    request, others = read_request([one for one in settings if not one.startswith("out=")])
    if others:
        raise ConfigError(
            f"{others[0]} is no setting of recipe: set it in the file that is written, or beside that when you train"
        )
    out = next((Path(one.partition("=")[2]).expanduser() for one in settings if one.startswith("out=")), None)
    if out is not None and out.suffix != ".yaml":
        raise ConfigError(f"out={out}: a configuration's name ends with .yaml; write out={out.stem or 'mine'}.yaml")
    return out, request


def published() -> dict[str, tuple[str, str]]:
    """Family and hub id of each model whose shape is shipped, by the name of its configuration, smaller ones first."""
    folder = shapes_directory()
    found = {}
    for file in sorted(folder.rglob("*.json")):
        model = str(file.relative_to(folder).with_suffix(""))
        family = yaml.safe_load(file.read_text(encoding="utf-8"))["model_type"]
        size = _SIZE.search(Path(model).name.lower())
        assert size is not None  # a shipped shape's name says how large it is
        found[(family, float(size[1][:-1]), model)] = (_name(family.removesuffix("_moe"), size[0]), (family, model))
    return dict(one for _, one in sorted(found.items()))


def _name(family: str, size: str) -> str:
    return re.sub(r"\W", "_", f"{family}_{size}")


def find_model(asked: str) -> tuple[str, str]:
    """A configuration's name, and the hub id or directory. Raises ConfigError for what is none."""
    if (Path(asked) / "config.json").is_file():
        return re.sub(r"\W+", "_", Path(asked).resolve().name.lower()), asked
    known = published()
    for name, of in known.items():
        if asked in (name, *of):
            return name, of[1]
    words = [word for name, of in known.items() for word in (name, *of)]
    raise ConfigError(
        f"{asked} is neither a published model of the list, nor a family of one, nor a directory with a config.json"
        f"{did_you_mean([nearest(asked, words)])}. {' '.join(shell_command('recipe'))} lists them"
    )


def plan_model(name: str, model: str, request: PlanRequest, say: Callable[[str], None]) -> Outcome:
    """The plan for the devices of the request, else for the fewest of `COUNTS` that surely hold the model; the last one
    tried where none does."""
    values = {"name": name, "vision.model_name": model, "text.model_name": model, **_TRAINING}
    with TemporaryDirectory(prefix="dhp-recipe-") as folder:
        (Path(folder) / "base.yaml").write_text(_DEFAULTS + nested_yaml(values), encoding="utf-8")
        config = compose_config("base", folder)

    def planned(asked: PlanRequest) -> Outcome:
        return find_plan(PlanQuery(config, name, asked, find_held(config)), say)

    if request.devices is not None:
        return planned(request)
    needed = 0.0
    for count in COUNTS:
        if count < needed:
            continue
        say(f"on {count} devices")
        outcome = planned(replace(request, devices=(count, min(count, NODE))))
        if outcome.best is not None and outcome.sure(outcome.best):
            break
        needed = _STATES * outcome.parameters / outcome.machine.limit_bytes
    return outcome


def recipe_text(name: str, outcome: Outcome) -> str:
    """The configuration with the plan's layout. What it does not set has the defaults' value."""
    best, config = outcome.best, outcome.asked.config
    assert best is not None  # or nothing is written
    models = {f"{part}.model_name": one.model_name for part, one in parts(config).items()}
    plain = Config(vision=PartConfig(), text=PartConfig(), audio=PartConfig())
    layout = {
        key: value
        for key, value in layout_settings(outcome, best).items()
        if reduce(getattr, key.split("."), plain) != value
        and not (value == 1 and key.rpartition(".")[2] in (*DEGREES, "expert"))
    }
    about = (
        f"# {model_name(config)}, {outcome.parameters / 1e9:.3g}B parameters, all trained, in bfloat16.\n"
        f"# Written by `dhp recipe {name}`: {_fits_on(outcome)},\n"
        f"# predicted for rows of up to 8,192 tokens, {str(outcome.samples).partition(' (')[0]}.\n"
    )
    return about + _DEFAULTS + nested_yaml({"name": name, **models, **_TRAINING, **layout})


def _fits_on(outcome: Outcome) -> str:
    best = outcome.best
    assert best is not None  # as above
    full, machine = best.found.peak.total / GIB, outcome.machine
    memory = f"{full:.1f} of {machine.memory_bytes / GIB:.1f} GiB"
    return f"on {machine.count} × {machine.name} {memory}, {best.found.step_s:.3g} s a step of 64 rows"
