"""One Ray for all tests of this folder: four logical CPUs, two logical GPUs, loopback only."""

from collections.abc import Iterator

import pytest

from tests.helpers import forks


@pytest.fixture(scope="package")
def local_ray() -> Iterator[None]:
    from dhp.cluster.address import LOCAL
    from dhp.cluster.ray_session import ray_session

    with forks.of_rays_here(), ray_session(LOCAL, cpus=4, gpus=2):
        yield
