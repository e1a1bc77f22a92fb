"""`python -m dhp doctor model PATH [--json]`: what of a model works here, before anything is launched."""

from __future__ import annotations

import argparse
from collections.abc import Sequence


def main(arguments: Sequence[str]) -> int:
    """doctor model: build a tiny model of the configuration in PATH (a directory with a config.json, or a hub id),
    train it for a step as a whole and in two parts, with padded and with packed rows, and compare losses and all
    gradients. Then name the layouts that each part has, and why not the others. The exit status is 0 when it can be
    trained.
    """
    parser = argparse.ArgumentParser(
        prog="python -m dhp doctor", description=main.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["model"])
    parser.add_argument("path", help="a model's directory; its config.json is enough")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    given = parser.parse_args(arguments)
    from dhp.doctor.examine import examine  # brings modeling code along, which takes seconds

    diagnosis = examine(given.path)
    print(diagnosis.as_json() if given.json else diagnosis.as_table())
    return 0 if diagnosis.trainable else 1
