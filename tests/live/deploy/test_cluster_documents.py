"""The documents of `harness/live/clusters` are read by the programs that they are for, as far as those are at hand."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

HERE = Path(__file__).parents[3] / "harness" / "live" / "clusters"
SLURM, GUIDE = (HERE / "live.sbatch").read_text(), (HERE / "README.md").read_text()


def test_the_batch_file_is_a_script():
    assert subprocess.run(["bash", "-n", HERE / "live.sbatch"], check=False).returncode == 0  # noqa: S603, S607


def test_the_manifest_names_what_it_uses():
    job, volume, policy = yaml.safe_load_all((HERE / "rayjob.yaml").read_text())
    cluster = job["spec"]["rayClusterSpec"]
    pods = [cluster["headGroupSpec"]["template"], *(g["template"] for g in cluster["workerGroupSpecs"])]
    for pod in pods:
        container = pod["spec"]["containers"][0]
        settings = {e["name"]: e.get("value") for e in container["env"]}
        assert settings["RAY_AUTH_MODE"] == "token"
        assert "RAY_AUTH_TOKEN" in settings
        assert pod["metadata"]["labels"] == policy["spec"]["podSelector"]["matchLabels"]
    assert pods[0]["spec"]["volumes"][0]["persistentVolumeClaim"]["claimName"] == volume["metadata"]["name"]
    command = shlex.split(job["spec"]["entrypoint"])
    assert command[:3] == ["harness", "deploy", "--live"]


@pytest.mark.timeout(120)
def test_ray_knows_the_options_that_are_written():
    known = subprocess.run(  # noqa: S603
        [str(Path(sys.executable).with_name("ray")), "start", "--help"], capture_output=True, text=True, check=True
    ).stdout
    commands = re.findall(r"ray start (?:[^\n]*\\\n)*[^\n]*", GUIDE + SLURM)
    assert len(commands) >= 4
    for option in {found for command in commands for found in re.findall(r"--[a-z-]+", command)}:
        assert option in known, option
