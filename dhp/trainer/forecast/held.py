"""Which keys of a layout a user set, so that a search keeps them."""

from __future__ import annotations

from collections.abc import Sequence

from dhp.config.layout import DEGREES
from dhp.config.part import PartConfig
from dhp.config.parts import parts
from dhp.config.schema import Config

# Keys of a part's section that a search sets where they are not held; parallelism and num_actors follow from them.
SEARCHED = (*DEGREES, "expert", "zero_stage", "zero_engine", "sequence_sharded_norms")


def held_keys(config: Config, overrides: Sequence[str] = ()) -> dict[str, frozenset[str]]:
    """By part of the run, the keys of `SEARCHED` that are set in a composed configuration, before it is resolved.

    A key that has its default counts as not set; a degree of 1 is set, for its default is null. parallelism and
    num_actors hold nothing: what they would leave to a degree, a search decides. Where a value comes from is not known:
    that of a shipped file is set as the user's own, and in the config.yaml of a run, which has every degree as a
    number, all are.

    overrides: of the command line, which alone say more. `text.zero_stage=0` holds what is the default too, and
    `text.tensor=null` or `~text.tensor` leaves a key to the search that a file had set.
    """
    plain = PartConfig()
    found = {
        name: {key for key in SEARCHED if getattr(part, key) != getattr(plain, key)}
        for name, part in parts(config).items()
    }
    for override in overrides:
        path, _, value = override.lstrip("+").partition("=")
        name, _, key = path.lstrip("~").partition(".")
        if name not in found or key not in SEARCHED:
            continue
        if path.startswith("~") or value in ("null", "auto"):
            found[name].discard(key)
        else:
            found[name].add(key)
    return {name: frozenset(keys) for name, keys in found.items()}
