"""`python -m dhp.train_ray --config-name=NAME [--config-path=DIR] key=value …`: Hydra → Config → run."""

from __future__ import annotations

import sys

from dhp.config.entry import hydra_entry
from dhp.config.schema import Config

INTERRUPTED = 130  # what a shell reports after Ctrl-C


def main(config: Config) -> None:
    """Check everything that can be checked, then train, or say what training would take."""
    from dhp.preflight import prepare

    prepared = prepare(config)
    if prepared.training.dry_run:
        from dhp.dry_run import dry_run

        print(dry_run(prepared))
        return
    from dhp.driver import run  # after the checks: it brings torch and Ray along

    try:
        run(prepared)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    hydra_entry(main)
