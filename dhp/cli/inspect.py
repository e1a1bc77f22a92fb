"""`python -m dhp inspect batch|data|sample FILE.yaml|--config-name=NAME [key=value …]`: what a model gets, and what the
data are."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from dhp.batch.build import make_reader
from dhp.checkpoint.shard_writer import save_tensors
from dhp.cli.common import add_configuration, make_parser
from dhp.cli.inspect_checkpoint import inspect_checkpoint
from dhp.config.command_line import compose_config
from dhp.config.schema import Config
from dhp.config.yaml_files import named_file
from dhp.core.errors import ConfigError
from dhp.core.process import StartUp, say_line
from dhp.trainer.batches import feed_settings
from dhp.trainer.layout import with_layout
from dhp.trainer.preflight import prepare

# Keys of each, by what it shows.
_OWN = {"batch": ("step", "out"), "data": ("out", "decode"), "sample": ("index", "out")}


def main(arguments: Sequence[str]) -> int:
    """inspect batch: write what the model gets in one step, so that anyone can check it against plain transformers.

    Keys are `<text data replica>/<micro-batch>/<argument of the model>`, both counted from 0; steps count from 1,
    as in metrics.jsonl. A row is a sample, right-padded, also where training packs the samples of a micro-batch into
    one row (data.packing): a packed row equals its samples one by one. The objective of the step is the sum of all
    token losses / all target tokens of the file.

    inspect data: measure every sample from headers, print counts, lengths, defective samples with file and line, and
    what each data.balance would make of them with this configuration. out=FOLDER (default: inspect_data in run_dir)
    gets lengths.png, balance.jsonl and defects.txt; decode=true decodes every sample as well, which finds damaged
    pixels.

    inspect sample: print the prompt of sample index=K (from 0, in the order of data.datasets) with its learned tokens
    marked, placeholders counted and lengths by modality. out=FILE.html (default: inspect_sample/K.html in run_dir) gets
    the same with the pictures as the model sees them.

    inspect checkpoint PATH [--verify]: what a checkpoint holds, and whether it is sound.
    """
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
    inspect_data(config, Path(own.get("out") or Path(config.run_dir) / "inspect_data"), decode == "true")
    return 0


def _sample(config: Config, own: dict[str, str]) -> int:
    from dhp.cli.inspect_sample import inspect_sample

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
