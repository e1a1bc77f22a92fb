"""`python -m dhp inspect batch --config-name=NAME step=K out=FILE.safetensors [key=value …]`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from safetensors.torch import save_file

from dhp.config.load import compose_config
from dhp.errors import ConfigError
from dhp.feed import make_feed
from dhp.preflight import prepare
from dhp.wiring import feed_settings


def main(arguments: Sequence[str]) -> int:
    """Write what the model gets in one step, so that anyone can check it against plain transformers.

    Keys are `<text data replica>/<micro-batch>/<argument of the model>`, both counted from 0; steps count from 1,
    as in metrics.jsonl. A row is a sample, right-padded, also where training packs the samples of a micro-batch into
    one row (data.packing): a packed row equals its samples one by one. The objective of the step is the sum of all
    token losses / all target tokens of the file.
    """
    parser = argparse.ArgumentParser(
        prog="python -m dhp inspect", description=main.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["batch"])
    parser.add_argument("--config-name", "-cn", required=True)
    parser.add_argument("--config-path", "-cp")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="step=K, out=FILE, overrides as in training")
    given = parser.parse_intermixed_args(arguments)
    own, overrides = _own(given.settings)
    config = prepare(compose_config(given.config_name, given.config_path, overrides), new_run=False)
    out = Path(own["out"])
    if out.is_dir():
        raise ConfigError(f"out={out} is a directory; give a file, for example out={out / 'batch.safetensors'}")
    tensors = make_feed(feed_settings(config)).model_inputs(_step(own["step"]) - 1)
    out.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out)
    for name, tensor in tensors.items():
        print(f"{name:32} {str(tensor.dtype).removeprefix('torch.'):8} {list(tensor.shape)}")
    print(f"written to {out}")
    return 0


def _own(settings: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """This command's own settings, and the overrides that are left. Raises ConfigError when one is missing."""
    own = {key: value for key, _, value in (s.partition("=") for s in settings) if key in ("step", "out")}
    for key, example in (("step", "step=1"), ("out", "out=batch.safetensors")):
        if not own.get(key):
            raise ConfigError(f"{key} is missing; add for example {example}")
    return own, [s for s in settings if s.partition("=")[0] not in own]


def _step(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise ConfigError(f"step={text}: steps are whole numbers from 1, as in metrics.jsonl")
    return int(text)
