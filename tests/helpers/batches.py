"""Steps of made samples that hold every awkward thing at once. Made once, so that what they give is known again."""

from functools import cache

from dhp.data.sample.sample import Sample
from tests.helpers.tiny import IMAGE_TOKEN, make_sample


def _make(grids: list[tuple[int, int, int]], tokens: int, targets: int, seed: int) -> Sample:
    return make_sample(grids, tokens, targets, seed, IMAGE_TOKEN)


@cache
def mixed_step() -> list[Sample]:
    """Unequal windows that no rank count divides, two images in a sample, no image, uneven target tokens."""
    return [
        _make([(1, 6, 10)], 5, 3, 1),
        _make([(1, 4, 6), (1, 8, 2)], 9, 8, 2),
        _make([], 6, 1, 3),
        _make([(1, 10, 14)], 4, 2, 4),
    ]


@cache
def step_without_image() -> list[Sample]:
    """Four text-only samples."""
    return [_make([], n, n - 2, 10 + n) for n in (5, 9, 4, 7)]


@cache
def step_with_one_window() -> list[Sample]:
    """A single image of a single window: most ranks have no work."""
    # Of the second, the first token has a label too, which nothing can predict.
    return [_make([], 8, 5, 21), _make([], 5, 7, 22), _make([(1, 2, 2)], 6, 3, 23), _make([], 4, 1, 24)]


@cache
def step_without_target() -> list[Sample]:
    """Nothing to learn, images included: no weight may change, not even by decay or momentum."""
    return [_make([(1, 4, 4)], 5, 0, 31), _make([], 6, 0, 32), _make([(1, 2, 6)], 3, 0, 33), _make([], 4, 0, 34)]


@cache
def awkward_steps() -> list[list[Sample]]:
    """All of them, one after another."""
    return [mixed_step(), step_without_image(), step_without_target(), step_with_one_window()]
