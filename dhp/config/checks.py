"""Rules between a part's degrees and its model's shape, as plain numbers: whoever knows the model calls them."""

from math import gcd

from dhp.errors import ConfigError


def check_ulysses(heads: int, ulysses: int) -> None:
    """Ulysses gives each actor whole heads: `heads` (of the vision tower) must be a multiple of `ulysses`.

    Raises ConfigError.
    """
    if heads % ulysses:
        raise ConfigError(
            f"vision.ulysses={ulysses} cannot split the vision tower's {heads} attention heads evenly: "
            f"heads({heads}) % ulysses({ulysses}) = {heads % ulysses} != 0. "
            f"Set vision.ulysses to one of {_divisors(heads)} and vision.num_actors to match."
        )


def check_tensor(heads: int, kv_heads: int, tensor: int) -> None:
    """Tensor parallelism gives each actor whole query heads and whole key/value heads: both are multiples of `tensor`.

    Raises ConfigError.
    """
    for name, count in (("heads", heads), ("kv_heads", kv_heads)):
        if count % tensor:
            kind = "attention" if name == "heads" else "key/value"
            raise ConfigError(
                f"text.tensor={tensor} cannot split the text decoder's {count} {kind} heads evenly: "
                f"{name}({count}) % tensor({tensor}) = {count % tensor} != 0. Set text.tensor to one of "
                f"{_divisors(gcd(heads, kv_heads))} and text.num_actors to match."
            )


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
