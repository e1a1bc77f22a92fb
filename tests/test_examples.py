"""The examples name what exists: configurations, keys, files, versions, and GPUs enough for their actors."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from dhp.config.command_line import compose_config
from dhp.config.resolve import resolve
from dhp.config.schema import Config

ROOT = Path(__file__).parents[1]
KUBERAY = ROOT / "examples" / "kuberay"
SHARED = "/shared"


@pytest.fixture(scope="module", params=["rayjob.yaml", "rayjob-4-workers.yaml"])
def spec(request: pytest.FixtureRequest) -> dict[str, Any]:
    job = yaml.safe_load((KUBERAY / request.param).read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    return job["spec"]


@pytest.fixture(scope="module")
def overrides(spec: dict[str, Any]) -> list[str]:
    python, module, name, config_name, *given = shlex.split(spec["entrypoint"])
    assert (python, module, name) == ("python", "-m", "dhp.train_ray")
    assert (ROOT / "configs" / f"{config_name.removeprefix('--config-name=')}.yaml").is_file()
    return [config_name.removeprefix("--config-name="), *given]


@pytest.fixture(scope="module")
def config(overrides: list[str]) -> Config:
    return resolve(compose_config(overrides[0], overrides=overrides[1:]))


def pods(spec: dict[str, Any]) -> list[tuple[int, dict[str, Any]]]:
    """How many there are of each kind of pod, and what it is; the head first."""
    cluster = spec["rayClusterSpec"]
    workers = [(group["replicas"], group["template"]["spec"]) for group in cluster["workerGroupSpecs"]]
    return [(1, cluster["headGroupSpec"]["template"]["spec"]), *workers]


def gpus(pod: dict[str, Any]) -> int:
    return sum(int(container["resources"]["limits"].get("nvidia.com/gpu", 0)) for container in pod["containers"])


def test_the_workers_have_a_gpu_and_a_cpu_for_every_device_of_the_run(spec: dict[str, Any], config: Config) -> None:
    actors = (config.vision.num_actors, config.text.num_actors)
    (_, head), *workers = pods(spec)
    assert gpus(head) == 0
    assert sum(count * gpus(pod) for count, pod in workers) >= (max if config.cluster.collocate else sum)(actors)
    for _, pod in workers:
        assert int(pod["containers"][0]["resources"]["limits"]["cpu"]) >= gpus(pod)
        assert gpus(pod) % config.text.tensor == 0 and gpus(pod) % config.vision.ulysses == 0


def test_what_the_comments_say_of_the_run_is_so(spec: dict[str, Any], config: Config) -> None:
    if spec["rayClusterSpec"]["workerGroupSpecs"][0]["replicas"] == 4:
        text = (KUBERAY / "rayjob-4-workers.yaml").read_text()
        assert f"on {config.text.num_actors} GPUs, four workers of four" in text and config.vision.ulysses == 4
        return
    text = (KUBERAY / "rayjob.yaml").read_text()
    actors = r"with vision.num_actors=(\d+) text.num_actors=(\d+)"
    told = rf"; (\d+) of (\d+) GPUs each {actors}: .*\s+# groups of this run are of (\d+)"
    pods, each, vision, text_actors, of = map(int, re.search(told, text).groups())
    assert pods * each == vision == text_actors == 2 * config.vision.num_actors
    assert of == config.vision.ulysses and each % of == 0
    assert config.text.tensor == 1  # no groups of text that a pod would have to hold
    assert (
        f"on {config.vision.num_actors} GPUs" in text
        and f"on {config.vision.num_actors} GPUs" in (KUBERAY / "README.md").read_text()
    )


def test_what_the_run_reads_and_writes_lies_on_the_disk_that_all_pods_mount(
    spec: dict[str, Any], config: Config
) -> None:
    train = config.data.data_registry["train"]
    paths = [config.run_dir, config.training.checkpoint_dir, config.vision.model_name]
    for path in (*paths, train.annotation_path, train.data_path):
        assert str(path).startswith(f"{SHARED}/")
    for _, pod in pods(spec):
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in pod["containers"][0]["volumeMounts"]}
        assert "persistentVolumeClaim" in mounts[SHARED] and mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"


def test_the_cluster_goes_when_the_run_has_ended_and_asks_for_a_token_while_it_is_there(spec: dict[str, Any]) -> None:
    assert spec["shutdownAfterJobFinishes"] is True and spec["ttlSecondsAfterFinished"] > 0
    assert spec["rayClusterSpec"]["authOptions"] == {"mode": "token"}


def test_image_and_cluster_have_the_required_ray(spec: dict[str, Any]) -> None:
    required = re.search(r"^ray\[default\]==(.+)$", (ROOT / "requirements.txt").read_text(), re.MULTILINE)[1]
    assert spec["rayClusterSpec"]["rayVersion"] == required
    assert f"FROM rayproject/ray:{required}-py311\n" in (KUBERAY / "Dockerfile").read_text()


def test_the_image_is_made_of_files_that_exist() -> None:
    copied = re.findall(r"^COPY (.+) \S+$", (KUBERAY / "Dockerfile").read_text(), re.MULTILINE)
    assert copied and all((ROOT / name).exists() for names in copied for name in names.split())


def test_files_named_in_the_readme_exist() -> None:
    named = re.findall(r"\b(examples/[\w./-]+\w)", (KUBERAY / "README.md").read_text())
    assert named and all((ROOT / name).exists() for name in named)
