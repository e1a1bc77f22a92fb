"""`python -m dhp inspect batch|data|sample|checkpoint …`: shows what a model gets, or a checkpoint holds."""

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from dhp.batch.reader import make_reader
from dhp.checkpoint.folder import (
    FORMAT,
    OPTIMIZER,
    check_checkpoint,
    find_checkpoint,
    has_checksums,
    read_about,
    step_folders,
    step_of,
)
from dhp.checkpoint.resume import LAYOUT
from dhp.checkpoint.shard_files import read_extents
from dhp.checkpoint.shard_writer import save_tensors
from dhp.cli.common import add_configuration, make_parser
from dhp.cli.sample_page import (
    Shown,
    TextRun,
    as_terminal,
    clips_of,
    lengths,
    pictures_of,
    placeholders,
    runs_of,
    sample_page,
    sides_of,
)
from dhp.config.command_line import compose_config
from dhp.config.schema import Config
from dhp.config.yaml_files import named_file
from dhp.core.errors import CheckpointError, ConfigError
from dhp.core.process import StartUp, say_line
from dhp.core.text import binary_size, harmless
from dhp.models.pretrained import load_image_processor, load_tokenizer
from dhp.models.registry import load_family
from dhp.plan.batches import feed_settings
from dhp.trainer.planned_layout import with_layout
from dhp.trainer.preflight import prepare


def inspect_checkpoint(arguments: Sequence[str]) -> int:
    """Say what a checkpoint holds, and what stands beside it. Exit status 0; 1 where one of them is damaged."""
    parser = make_parser("inspect checkpoint", inspect_checkpoint.__doc__)
    parser.add_argument("checkpoint", type=Path, help="a checkpoint, or a run or a directory of checkpoints")
    parser.add_argument("--verify", action="store_true", help="read every byte and compare checksums, of all of them")
    parser.add_argument("--json", action="store_true", help="one object of JSON instead of text")
    given = parser.parse_args(arguments)
    found = _folders(given.checkpoint)
    states = {folder.name: _state(folder, given.verify) for folder in found}
    newest = next((folder for folder in found if states[folder.name] == "sound"), None)
    about = {} if newest is None else describe(newest)
    if given.json:
        print(json.dumps({"checkpoints": states} | about))
    else:
        print("\n".join([*_lines(about), *(f"{name:14} {state}" for name, state in states.items())]))
    return 0 if all(state == "sound" for state in states.values()) else 1


def describe(checkpoint: Path) -> dict[str, Any]:
    """What a sound checkpoint holds. Raises CheckpointError."""
    about = read_about(checkpoint, ("step", "parts", "settings", "files"))
    sizes = {name: one["bytes"] if has_checksums(about) else one for name, one in about["files"].items()}
    parts = {part: _part(checkpoint / part, sizes, part) for part in about["parts"]}
    return {
        "checkpoint": str(checkpoint),
        "format": about.get(FORMAT, 1),
        "step": about["step"],
        "model_name": about.get("model_name"),
        "bytes": sum(sizes.values()),
        "skipped_samples": about.get("skipped_samples"),
        "parts": parts,
        "settings": about["settings"],
    }


def _folders(path: Path) -> list[Path]:
    """The checkpoint that is meant, or all of a run."""
    for parent in (path / "checkpoints", path):
        if path.is_dir() and (found := step_folders(parent)):
            return found
    if path.is_dir() and path.name.startswith("step_") and path.name[5:].isdecimal():
        return [path]
    return [find_checkpoint(path)]


def _state(folder: Path, verify: bool) -> str:
    try:
        check_checkpoint(folder, lambda text: print(text, file=sys.stderr), contents=verify)
    except CheckpointError as error:
        return str(error)
    return "sound"


def _part(folder: Path, sizes: Mapping[str, int], part: str) -> dict[str, Any]:
    """Of one part: ranks that wrote, tensors, their number formats, bytes, and whether pieces make them."""
    extents = [extent for file in sorted(folder.glob("rank_*.json")) for extent in read_extents(file).items()]
    names = {name for name, _ in extents}
    states = [file for file in sorted((folder / OPTIMIZER).glob("rank_*.json")) for _ in read_extents(file)]
    return {
        "ranks": len({name.split("/")[-1][:10] for name in sizes if name.startswith(f"{part}/")}),
        "tensors": len(names),
        "pieces": len(extents),
        "formats": sorted({extent["dtype"] for _, extent in extents if "dtype" in extent}),
        "states": len(states),
        "bytes": sum(size for name, size in sizes.items() if name.startswith(f"{part}/")),
    }


def _lines(about: Mapping[str, Any]) -> list[str]:
    if not about:
        return []
    settings = about["settings"]
    layout: Mapping[str, Any] = settings.get(LAYOUT, {})
    lines = [
        f"checkpoint     {about['checkpoint']}",
        f"step           {step_of(Path(about['checkpoint']))}, format {about['format']}, {binary_size(about['bytes'])}",
        f"model          {about['model_name']}",
    ]
    for name, part in about["parts"].items():
        formats = f" in {', '.join(part['formats'])}" if part["formats"] else ""
        lines.append(
            f"{name:14} {part['tensors']} tensors{formats} in {part['pieces']} pieces, {part['states']} pieces of the "
            f"optimizer's states, {binary_size(part['bytes'])} by {part['ranks']} ranks"
        )
        own = {key.partition(".")[2]: value for key, value in layout.items() if key.startswith(f"{name}.")}
        shown = ", ".join(f"{key} {value}" for key, value in own.items() if value != 1)
        lines += [f"{'':14} written with {shown}"] if shown else []
    return lines


# Keys of each, by what it shows.
_OWN = {"batch": ("step", "out"), "data": ("out", "decode", "by"), "sample": ("index", "out")}


def main(arguments: Sequence[str]) -> int:
    """inspect batch: write what the model gets in one step, so that anyone can check it against plain transformers.

    Keys are `<text data replica>/<micro-batch>/<argument of the model>`, both counted from 0; steps count from 1,
    as in metrics.jsonl. A row is a sample, right-padded, also where training packs the samples of a micro-batch into
    one row (data.packing): a packed row equals its samples one by one. The objective of the step is the sum of all
    token losses / all target tokens of the file.

    inspect data: measure every sample from headers, print counts, lengths, defective samples with file and line, and
    what each data.balance would make of them with this configuration. out=FOLDER (default: inspect_data in run_dir)
    gets lengths.png, balance.jsonl and defects.txt; decode=true decodes every sample as well, which finds damaged
    pixels. by=KEY counts samples by what annotations have under a key of theirs, as kind.

    inspect sample: print the prompt of sample index=K (from 0, in the order of data.datasets) with its learned tokens
    marked, placeholders counted and lengths by modality. out=FILE.html (default: inspect_sample/K.html in run_dir) gets
    the same with the pictures as the model sees them.

    inspect checkpoint PATH [--verify]: what a checkpoint holds, and whether it is sound."""
    if arguments[:1] == ["checkpoint"]:
        return inspect_checkpoint(arguments[1:])
    parser = make_parser("inspect", main.__doc__)
    parser.add_argument("what", choices=[*_OWN, "checkpoint"])
    add_configuration(parser, "FILE.yaml, own keys, overrides")
    given = parser.parse_intermixed_args(arguments)
    if given.what == "checkpoint":
        parser.error("checkpoint comes first, and its path next: inspect checkpoint PATH [--verify]")
    (name, path), settings = named_file(given.settings, given.config_name, given.config_path)
    if name is None:
        raise ConfigError("name a FILE.yaml, or --config-name=NAME, as tiny")
    own = {key: value for key, _, value in (s.partition("=") for s in settings) if key in _OWN[given.what]}
    overrides = [setting for setting in settings if setting.partition("=")[0] not in own]
    say = StartUp(time.perf_counter(), partial(say_line, file=sys.stderr))  # stdout may go into a file
    config = with_layout(compose_config(name, path, overrides), say, overrides, new_run=False)
    config = prepare(config, new_run=False, say=say)
    say("reading the data")
    return {"batch": _batch, "data": _data, "sample": _sample}[given.what](config, own)


def _batch(config: Config, own: dict[str, str]) -> int:
    for key, example in (("step", "step=1"), ("out", "out=batch.safetensors")):
        if not own.get(key):
            raise ConfigError(f"{key} is missing; add for example {example}")
    out = Path(own["out"])
    if out.is_dir():
        raise ConfigError(f"out={out} is a directory; give a file, for example out={out / 'batch.safetensors'}")
    tensors = make_reader(feed_settings(config)).model_inputs(_step(own["step"]) - 1)
    out.parent.mkdir(parents=True, exist_ok=True)
    save_tensors(tensors, out)
    for name, tensor in tensors.items():
        print(f"{name:32} {str(tensor.dtype).removeprefix('torch.'):8} {list(tensor.shape)}")
    print(f"written to {out}")
    return 0


def _data(config: Config, own: dict[str, str]) -> int:
    from dhp.cli.inspect_data import inspect_data

    decode = own.get("decode", "false")
    if decode not in ("true", "false"):
        raise ConfigError(f"decode={decode} is neither true nor false")
    inspect_data(
        config, Path(own.get("out") or Path(config.run_dir) / "inspect_data"), decode == "true", own.get("by", "")
    )
    return 0


def _sample(config: Config, own: dict[str, str]) -> int:

    index = own.get("index", "")
    if not index.isdecimal():
        raise ConfigError(f"index={index}: samples are counted from 0; add for example index=0")
    out = Path(own.get("out") or Path(config.run_dir) / "inspect_sample" / f"{int(index)}.html")
    if out.is_dir():
        raise ConfigError(f"out={out} is a directory; give a file, for example out={out / 'sample.html'}")
    inspect_sample(config, int(index), out)
    return 0


def _step(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise ConfigError(f"step={text}: steps are whole numbers from 1, as in metrics.jsonl")
    return int(text)


def inspect_sample(config: Config, index: int, out: Path) -> None:
    """Print a sample and write the page `out`. index: 0-based, in the order of data.datasets.

    Raises ConfigError for an index beyond the datasets, DataError for a sample that cannot be used."""
    settings = feed_settings(config)
    settings = replace(settings, balancing=replace(settings.balancing, method="random", window=None))
    feed = make_reader(settings)
    if index >= feed.dataset_size:
        names = ", ".join(config.data.datasets)
        raise ConfigError(
            f"index={index} is beyond the {feed.dataset_size} samples that an epoch of {names} shows; samples are "
            f"counted from 0, so give one up to {feed.dataset_size - 1}"
        )
    record, sample = feed.sample(index)
    processor, name = load_family(settings.model_name).processor, settings.model_name
    tokenizer, images = load_tokenizer(name, settings.data.chat_template), load_image_processor(name)
    runs, shown = list[TextRun](), list[Shown]()
    for heading, of_side, side in sides_of(record, sample):
        runs += [*([TextRun(heading, 0, 0, False)] if heading else []), *runs_of(side, tokenizer)]
        if not side.again:
            of = pictures_of(of_side, side, processor, images) + clips_of(of_side, side)
            side_name = heading.strip("\n —")
            shown += [replace(one, caption=f"{side_name}, {one.caption}") if side_name else one for one in of]
    counts, title = lengths(sample), f"sample {index} of {feed.dataset_size}: {record.where}"
    held = placeholders(runs)
    template = config.data.chat_template or f"the model's own ({name})"
    notes = [f"placeholders: {', '.join(held) or 'none'}", f"chat template: {template}"]
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(sample_page(title, runs, counts, notes, shown), encoding="utf-8")
    colours = _has_colours()
    legend = "green: learned; cyan: placeholders × tokens" if colours else "⟦learned⟧ ⟨placeholder × tokens⟩"
    print(f"{harmless(title)}\n{legend}\n\n{as_terminal(runs, colours)}")
    for note in notes:
        print(harmless(note))
    print("tokens: " + ", ".join(f"{kind} {count}" for kind, count in counts.items()))
    for one in shown:
        print(harmless(one.caption))
    print(f"written to {out}")


def _has_colours() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
