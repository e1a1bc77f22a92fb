"""Shared by all tests: small models made once a session."""

import atexit
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.runs import BROKEN, LONG, Outcome, tiny, train
from tests.helpers.skips import hold

# One thread a process, as ranks have: what tests compute is small, and threads that wait for one another beside
# several ranks on few cores take many times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_worker_niceness", "0")  # by default all else on the machine goes before the actors
# One for all runs of tests, which have caches of their own.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/dhp-tests-compiled-{os.getuid()}")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


_STATUS = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fuzz-minutes", type=float, default=5.0, help="how long `-m fuzz` draws layouts")
    parser.addoption("--fuzz-seed", type=int, default=24, help="which layouts `-m fuzz` draws")
    parser.addoption(
        "--nullcuda-rows", help="the file that `-m nullcuda` appends its rows to, in the place of holding them"
    )


@pytest.fixture(autouse=True)
def own_signal_handlers() -> Iterator[None]:
    """What a command that a test calls does at a signal stays until the test ends, not until its process does."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        if handler is not None and signal.getsignal(number) is not handler:  # None: not set from Python
            signal.signal(number, handler)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    session.config.stash[_STATUS] = int(exitstatus)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """End with pytest's own status. Ray's libraries leave threads in a process that was a driver, and one of them once
    ended it with a segmentation fault on its way out, after all tests had passed."""
    if _STATUS in config.stash and "ray" in sys.modules and not hasattr(config, "workerinput"):
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(config.stash[_STATUS])


@pytest.hookimpl(optionalhook=True)  # xdist's
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With several workers (`pytest -n 2 --dist loadgroup`), tests that share something costly go to one of them."""
    if config.getoption("dist") != "loadgroup":
        return None
    from tests.helpers.together import Together

    return Together(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With several workers, what takes long begins first."""
    if hasattr(config, "workerinput"):
        from tests.helpers.together import place_of

        items.sort(key=lambda item: place_of(item.nodeid))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    hold(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    hold(report)
    return report


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Measured lengths stay out of the user's cache."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder


@pytest.fixture(scope="session")
def made_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Directory of a Qwen2.5-VL with random weights that no text was ever shown to."""
    from tests.helpers.tiny import save_model

    return str(save_model(Path(tmp_path_factory.mktemp("models")) / "made"))


@pytest.fixture(scope="session")
def few_keys_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same with 2 key/value heads for 8 query heads, and tied embeddings, as the 3B has."""
    from tests.helpers.tiny import save_model

    folder = Path(tmp_path_factory.mktemp("models")) / "few_keys"
    return str(save_model(folder, tied=True, text={"num_key_value_heads": 2}))


@pytest.fixture(scope="session")
def attending_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same with 24 query and 8 key/value heads, 4 decoder layers, and queries and keys so large that tokens attend
    to some others far more than to the rest."""
    from tests.helpers.tiny import save_model

    folder = Path(tmp_path_factory.mktemp("models")) / "attending"
    positions = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
    heads = {"num_attention_heads": 24, "num_key_value_heads": 8, "hidden_size": 192, "rope_parameters": positions}
    return str(save_model(folder, text={**heads, "num_hidden_layers": 4}, sharpness=6.0))


@pytest.fixture(scope="session")
def nine_heads_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same with 9 query heads over 3 key/value heads, as small decoders have them, and 3 heads of the tower."""
    from tests.helpers.tiny import save_model

    folder = Path(tmp_path_factory.mktemp("models")) / "nine_heads"
    positions = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72, "rope_parameters": positions}
    return str(save_model(folder, text=heads, sharpness=6.0, tower={"num_heads": 3, "hidden_size": 24}))


@pytest.fixture(scope="session")
def qwen3_vl_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Qwen3-VL with random weights: features of three tower layers enter the decoder behind its first three."""
    from tests.helpers.tiny import save_qwen3_vl

    return str(save_qwen3_vl(Path(tmp_path_factory.mktemp("models")) / "qwen3_vl"))


@pytest.fixture(scope="session")
def four_layers_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same as `made_model` with four decoder layers, so that there is something to cut into stages."""
    from tests.helpers.tiny import save_model

    folder = Path(tmp_path_factory.mktemp("models")) / "four_layers"
    return str(save_model(folder, text={"num_hidden_layers": 4}))


@pytest.fixture(scope="session")
def tied_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Four decoder layers, and a head that is the embedding."""
    from tests.helpers.tiny import save_model

    folder = Path(tmp_path_factory.mktemp("models")) / "tied"
    return str(save_model(folder, tied=True, text={"num_hidden_layers": 4}))


@pytest.fixture(scope="session")
def llava_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A LLaVA with random weights: a tower of independent images."""
    from tests.helpers.tiny import save_llava

    return str(save_llava(Path(tmp_path_factory.mktemp("models")) / "llava"))


@pytest.fixture(scope="session")
def head_norms_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A LLaVA whose decoder has a norm of each head, as Qwen3's."""
    from tests.helpers.tiny import save_llava_with_head_norms

    return str(save_llava_with_head_norms(Path(tmp_path_factory.mktemp("models")) / "head_norms"))


@pytest.fixture(scope="session")
def experts_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A LLaVA whose decoder has 4 experts in each layer, of which a token visits 2."""
    from tests.helpers.tiny import save_llava_with_experts

    return str(save_llava_with_experts(Path(tmp_path_factory.mktemp("models")) / "experts"))


@pytest.fixture(scope="session")
def qwen3_vl_moe_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Qwen3-VL with experts in each decoder layer but one."""
    from tests.helpers.tiny import save_qwen3_vl_moe

    return str(save_qwen3_vl_moe(Path(tmp_path_factory.mktemp("models")) / "qwen3_vl_moe"))


@pytest.fixture(scope="session")
def tiny_assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded default's model and dataset."""
    from dhp.tiny.tiny_model import make_tiny_assets

    folder = tmp_path_factory.mktemp("assets")
    make_tiny_assets(folder)
    return folder


@pytest.fixture(scope="session")
def long_assets(tiny_assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, with two pictures that are cut off."""
    folder = tmp_path_factory.mktemp("cut") / "assets"
    shutil.copytree(tiny_assets, folder)
    for name in BROKEN:
        (folder / "data" / name).write_bytes((folder / "data" / name).read_bytes()[:60])
    return folder


@pytest.fixture(scope="session")
def long_run(long_assets: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    """The embedded default as a user starts it: the directory of the run and how it ended. Who changes it copies it."""
    run_dir = tmp_path_factory.mktemp("run") / "long"
    return run_dir, train(*tiny(long_assets, run_dir, *LONG), real=True)
