"""The Slurm script, with stand-ins for what a cluster has: what is started where, in which order, and how it ends."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from dhp.config.command_line import compose_config

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "examples" / "slurm" / "run.sbatch"
# Each writes what it was asked for, with the token's length in the place of the token.
SRUN = """#!/bin/bash
echo "srun $* token=${#RAY_AUTH_TOKEN} mode=$RAY_AUTH_MODE" >> "$CALLS"
while [[ "$1" == --* ]]; do shift; done
case "$1 $2" in
  "hostname --ip-address") echo "10.0.0.5 fe80::1" ;;
  "ray status") [[ $(grep -c "ray status" "$CALLS") -ge 2 ]] ;;
  "ray start") exec sleep 30 ;;
  "python -m") exec "$TRAIN" ;;
esac
"""
STUBS = {
    "srun": SRUN,
    "scontrol": "#!/bin/bash\nprintf 'n1\\nn2\\nn3\\n'\n",
    # A run that ended at once would end the other nodes' Ray before its stand-in has written.
    "train": "#!/bin/bash\n"
    "for _ in {1..600}; do grep -q 'ray start --address' \"$CALLS\" && break; sleep 0.05; done\nexit 7\n",
    "patient": "#!/bin/bash\ntrap 'echo saved >> \"$CALLS\"; exit 130' TERM\nwhile true; do sleep 0.05; done\n",
}


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    for name, text in STUBS.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "activate").write_text("")
    return {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "CALLS": str(tmp_path / "calls"),
        "TRAIN": str(tmp_path / "train"),
        **{"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_SUBMIT_DIR": str(tmp_path)},
    }


def calls(environment: dict[str, str]) -> list[str]:
    return Path(environment["CALLS"]).read_text().splitlines()


def test_the_job_asks_for_as_many_gpus_as_its_configuration_has_actors() -> None:
    script = SCRIPT.read_text()
    nodes, gpus = (int(re.search(rf"#SBATCH --{key}=(\d+)", script)[1]) for key in ("nodes", "gpus-per-node"))
    config = compose_config(re.search(r"--config-name=(\w+)", script)[1])
    assert nodes * gpus == max(config.vision.num_actors, config.text.num_actors) and config.cluster.collocate


def test_ray_starts_on_each_node_and_the_run_on_the_first(environment: dict[str, str]) -> None:
    done = subprocess.run(["bash", str(SCRIPT), "--config-name=tiny"], env=environment, timeout=60)
    assert done.returncode == 7  # the run's
    found = calls(environment)
    heads = [line for line in found if "ray start --head" in line]
    others = [line for line in found if "ray start --address" in line]
    (run,) = [line for line in found if "dhp.train_ray" in line]
    assert len(heads) == len(others) == 1
    assert "--nodelist=n1" in heads[0] and "--node-ip-address=10.0.0.5 --port=20007" in heads[0]
    assert "--nodes=2 --ntasks=2 --nodelist=n2,n3" in others[0] and "--address=10.0.0.5:20007" in others[0]
    assert "--nodelist=n1" in run and "--config-name=tiny cluster.address=10.0.0.5:20007" in run
    assert "training.max_restarts=20 training.elastic=[auto]" in run
    assert all("mode=token" in line and "token=64" in line for line in found)


def test_the_end_of_the_time_lets_the_run_save(environment: dict[str, str]) -> None:
    environment["TRAIN"] = environment["TRAIN"].replace("train", "patient")
    job = subprocess.Popen(["bash", str(SCRIPT)], env=environment)
    deadline = time.monotonic() + 60
    while not any(
        "dhp.train_ray" in line for line in (calls(environment) if Path(environment["CALLS"]).exists() else [])
    ):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(0.5)  # the stand-in's trap is set
    job.send_signal(signal.SIGTERM)
    assert job.wait(timeout=60) == 130 and calls(environment)[-1] == "saved"
