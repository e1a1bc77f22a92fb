"""Every declared family answers as the plain model does, in each layout, or is refused by name.

Minutes, so only on demand: `make test ARGS='-m families'`. What always runs is a layout of some.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from dhp.config.layout import resolve_part
from dhp.config.schema import PartConfig
from dhp.core.axes import Degrees
from dhp.core.batch import IGNORED, Sampling
from dhp.core.errors import ConfigError, ModelError
from dhp.data.sample.sample import Sample
from dhp.doctor.diagnose import staying_double
from dhp.engine.stage_settings import StageSettings
from dhp.models.registry import load_family
from tests.engine.test_declared_families import ExactVision
from tests.helpers.answers import RecordingText, answer, plain_logits
from tests.helpers.families import Maker
from tests.helpers.layouts import Case, Fault
from tests.helpers.rows import slow
from tests.helpers.tiny_families import FAMILIES, IMAGE, save_family

NEW = Sampling(6)
# Layers with state, a prompt whose tokens all see each other.
REFUSED = {"qwen3_5", "qwen3_5_moe", "minicpmv4_6", "paligemma2"}


class ExactText(RecordingText):
    """Its process computes in float64 all through."""

    def __init__(self, settings: StageSettings):
        self._double = staying_double()
        self._double.__enter__()
        super().__init__(settings)


def _prompt(sample: Sample) -> Sample:
    return Sample(**{**vars(sample), "labels": np.full_like(sample.labels, IGNORED)})


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[str, list[Sample]]]]:
    """Models and prompts by the name of the case, as they are asked for."""

    class Models(dict[str, tuple[str, list[Sample]]]):
        def __missing__(self, name: str) -> tuple[str, list[Sample]]:
            folder = str(save_family(name, tmp_path_factory.mktemp(name)))
            with staying_double():
                maker = Maker(folder)
                self[name] = folder, [_prompt(maker.sample(pictures, 9, 7)) for pictures in ([0, 1], [2])]
            return self[name]

    return Models()


LAYOUTS = {"one": Degrees(), "ulysses": Degrees(ulysses=2), "ring": Degrees(ring=2), "tensor": Degrees(tensor=2)}
SOME = [slow("gemma3", "ulysses"), slow("gemma4", "tensor"), ("llava_clip", "ring")]


def check(name: str, layout: str, made: dict[str, tuple[str, list[Sample]]]) -> None:
    folder, prompts = made[name]
    decoder, degrees = load_family(folder).decoder, LAYOUTS[layout]
    if name in REFUSED:
        with pytest.raises(ModelError, match="it can be trained, but not answer prompts"):
            decoder.check_answers()
        return
    decoder.check_answers()
    parallelism = "none" if layout == "one" else "tensor" if layout == "tensor" else "sequence"
    own = {axis: getattr(degrees, axis) for axis in ("ring", "ulysses", "tensor")}
    try:
        decoder.check(resolve_part("text", PartConfig(parallelism=parallelism, num_actors=degrees.world, **own)))
    except ConfigError:
        return
    with staying_double():
        found = answer(folder, Case(Degrees(), degrees, 1), prompts, NEW, Fault(ExactVision, ExactText))
        for sample, told in zip(prompts, found, strict=True):
            # Where the model says a placeholder, the plain one looks for a picture more.
            said = next((n for n, token in enumerate(told.tokens) if token >= IMAGE), len(told.tokens) - 1)
            wanted = plain_logits(folder, sample, told.tokens[: said + 1])
            assert float((told.logits[: said + 1] - wanted).abs().max() / wanted.abs().max()) < 1e-12


@pytest.mark.families
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family(name: str, layout: str, made: dict[str, tuple[str, list[Sample]]]) -> None:
    check(name, layout, made)


@pytest.mark.parametrize(("name", "layout"), SOME)
def test_some_families(name: str, layout: str, made: dict[str, tuple[str, list[Sample]]]) -> None:
    check(name, layout, made)
