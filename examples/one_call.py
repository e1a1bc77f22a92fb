"""Training from a program: a configuration, changed at will, and one call."""

import sys

import dhp


def main(overrides: list[str]) -> None:
    """Train, and print how it ended."""
    config = dhp.load_config("tiny", overrides)
    config.training.max_grad_norm = 1.0  # a dataclass; what is wrong in it is refused before any actor starts
    summary = dhp.train(config)
    print(f"{summary['status']} after {summary['steps']} steps: loss {summary['last_loss']:.4f}")


if __name__ == "__main__":
    main(sys.argv[1:] or ["training.max_steps=3", "run_dir=runs/one-call", "overwrite=true"])
