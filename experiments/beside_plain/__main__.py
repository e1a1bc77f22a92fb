"""`python -m experiments.beside_plain --config-name=NAME [--config-path=DIR] key=value …`, as in training."""

from __future__ import annotations

import argparse
import json

import torch

from dhp.config.command_line import compose_config
from experiments.beside_plain.compare import compare


def main() -> None:
    """Print one JSON object: deviations from the plain model, and both step times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config-name", default="tiny")
    parser.add_argument("--config-path")
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_intermixed_args()
    config = compose_config(given.config_name, given.config_path, ["training.warmup_steps=0", *given.overrides])
    device = "cuda" if torch.cuda.is_available() and config.cluster.device != "cpu" else "cpu"
    print(json.dumps(compare(config, device)))


if __name__ == "__main__":
    main()
