"""The documents of `harness/live/clusters` are read by the programs that they are for, as far as those are at hand."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import jsonschema
import pytest
import ray
import yaml

ROOT = Path(__file__).parents[3]
HERE = ROOT / "harness" / "live" / "clusters"
SLURM, GUIDE, MANIFEST, IMAGE = (
    (HERE / name).read_text() for name in ("live.sbatch", "README.md", "rayjob.yaml", "Dockerfile")
)


def test_the_batch_file_is_a_script():
    assert subprocess.run(["bash", "-n", HERE / "live.sbatch"], check=False).returncode == 0  # noqa: S603, S607


RAY = """#!/bin/bash
# Stands in for Ray, which ends some time after it is asked to: when the test says so.
case $1 in
status) echo ' 1 node_a'; echo ' 1 node_b' ;;
start)
    trap 'trap "" TERM; touch "ending-$$"; until [[ -e end ]]; do sleep .1; done; touch "ended-$$"; exit' TERM
    touch "started-$$"
    while :; do sleep .1; done
    ;;
esac
"""
STANDS_IN = {
    "ray": RAY,
    "srun": '#!/bin/bash\nwhile [[ $1 == --* ]]; do shift; done\nexec "$@"\n',
    "harness": "#!/bin/bash\ntrap 'sleep .5; exit 143' TERM\ntouch job\nwhile :; do sleep .1; done\n",
}


@pytest.mark.timeout(60)
def test_the_batch_file_waits_for_the_end_of_ray_and_keeps_the_jobs_status(tmp_path):
    """Slurm sends SIGTERM before the time is over, and once more when it is."""
    for name, script in STANDS_IN.items():
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    with subprocess.Popen(["bash", HERE / "live.sbatch", "a"], cwd=tmp_path, env=os.environ | slurm) as batch:  # noqa: S603, S607
        while not (tmp_path / "job").exists():
            assert batch.poll() is None
            time.sleep(0.05)
        batch.send_signal(signal.SIGTERM)
        while len(list(tmp_path.glob("ending-*"))) < 2:  # the job has ended, and Ray is ending
            assert batch.poll() is None
            time.sleep(0.05)
        batch.send_signal(signal.SIGTERM)
        (tmp_path / "end").touch()
        assert batch.wait() == 143
    assert (len(list(tmp_path.glob("started-*"))), len(list(tmp_path.glob("ended-*")))) == (2, 2)


def _fields(*required, **properties):
    """The schema of an object that has no other fields."""
    kinds = {name: {"type": kind} if isinstance(kind, str) else kind for name, kind in properties.items()}
    return {"type": "object", "properties": kinds, "required": list(required), "additionalProperties": False}


def _many(schema):
    return {"type": "array", "items": schema, "minItems": 1}


_WORDS = {"type": "object", "additionalProperties": {"type": "string"}}
_AMOUNTS = {"type": "object", "additionalProperties": {"type": "string", "pattern": r"^[0-9.]+(m|Ki|Mi|Gi)?$"}}
_RESOURCES = _fields(limits=_AMOUNTS, requests=_AMOUNTS)
_MATCHING = _fields(matchLabels=_WORDS)
_CONTAINER = _fields(
    "name",
    "image",
    name="string",
    image="string",
    env=_many(_fields("name", "value", name="string", value="string")),
    resources=_RESOURCES,
    volumeMounts=_many(_fields("name", "mountPath", name="string", mountPath="string")),
)
_POD = _fields(
    "spec",
    metadata=_fields(labels=_WORDS),
    spec=_fields(
        "containers",
        containers=_many(_CONTAINER),
        securityContext=_fields(fsGroup="integer"),
        volumes=_many(_fields("name", name="string", persistentVolumeClaim=_fields("claimName", claimName="string"))),
    ),
)


def _object(version, kind, spec):
    named = {"apiVersion": {"const": version}, "kind": {"const": kind}, "metadata": _fields("name", name="string")}
    return _fields("apiVersion", "kind", "metadata", "spec", **named, spec=spec)


SCHEMAS = (
    _object(
        "ray.io/v1",
        "RayJob",
        _fields(
            "entrypoint",
            "rayClusterSpec",
            entrypoint="string",
            shutdownAfterJobFinishes="boolean",
            submissionMode={"enum": ["K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"]},
            rayClusterSpec=_fields(
                "headGroupSpec",
                rayVersion="string",
                authOptions=_fields("mode", mode={"enum": ["token", "disabled"]}),
                headGroupSpec=_fields("template", rayStartParams=_WORDS, template=_POD),
                workerGroupSpecs=_many(
                    _fields(
                        "groupName",
                        "template",
                        groupName="string",
                        replicas="integer",
                        minReplicas="integer",
                        maxReplicas="integer",
                        rayStartParams=_WORDS,
                        template=_POD,
                    )
                ),
            ),
        ),
    ),
    _object(
        "v1",
        "PersistentVolumeClaim",
        _fields("accessModes", "resources", accessModes=_many({"enum": ["ReadWriteOnce"]}), resources=_RESOURCES),
    ),
    _object(
        "networking.k8s.io/v1",
        "NetworkPolicy",
        _fields(
            "podSelector",
            podSelector=_MATCHING,
            policyTypes=_many({"enum": ["Ingress", "Egress"]}),
            ingress=_many(
                {
                    **_fields(
                        "from",
                        ports=_many(_fields(protocol={"enum": ["TCP", "UDP"]}, port="integer")),
                        **{"from": _many(_fields(podSelector=_MATCHING, namespaceSelector=_MATCHING))},
                    )
                }
            ),
        ),
    ),
)
"""The fields of KubeRay and of Kubernetes that the manifest may use, with their types, from the reference of both. A field
that is misspelt, misplaced or of another type is refused."""


def test_the_manifest_has_only_fields_that_there_are():
    documents = list(yaml.safe_load_all(MANIFEST))
    for document, schema in zip(documents, SCHEMAS, strict=True):
        jsonschema.validate(document, schema)
    job = yaml.safe_load(MANIFEST.partition("---")[0].replace("minReplicas", "minReplica"))
    with pytest.raises(jsonschema.ValidationError, match="'minReplica' was unexpected"):
        jsonschema.validate(job, SCHEMAS[0])


def test_the_manifest_names_what_it_uses():
    job, volume, policy = yaml.safe_load_all(MANIFEST)
    cluster = job["spec"]["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"}
    assert cluster["rayVersion"] == ray.__version__
    pods = [cluster["headGroupSpec"]["template"], *(g["template"] for g in cluster["workerGroupSpecs"])]
    for pod in pods:
        assert pod["metadata"]["labels"] == policy["spec"]["podSelector"]["matchLabels"]
    head = pods[0]["spec"]
    settings = {e["name"]: e["value"] for e in head["containers"][0]["env"]}
    assert settings == dict(re.findall(r"(RAY_health\w+)=(\d+)", GUIDE))
    assert head["volumes"][0]["persistentVolumeClaim"]["claimName"] == volume["metadata"]["name"]
    command = shlex.split(job["spec"]["entrypoint"])
    assert command[:3] == ["harness", "deploy", "--live"]
    folder = head["containers"][0]["volumeMounts"][0]["mountPath"]
    assert command[command.index("--out") + 1].startswith(f"{folder}/")
    submitter = {
        "podSelector": {"matchLabels": {"job-name": job["metadata"]["name"]}}
    }  # the label that a Job gives its pods
    assert submitter in policy["spec"]["ingress"][0]["from"]


def _steps():
    """Instructions of the Dockerfile: their name, and the rest."""
    whole = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", IMAGE, flags=re.M))
    return [line.split(maxsplit=1) for line in whole.splitlines() if line]


def test_the_image_has_what_kuberay_asks_for():
    """Its submitter talks to Ray's dashboard, and its probes call wget."""
    assert "ray[default]==" in IMAGE
    assert re.search(r"apt-get install .*\bwget\b", IMAGE)
    user = next(rest for name, rest in _steps() if name == "USER")
    assert f"useradd --uid {user} " in IMAGE
    job = next(yaml.safe_load_all(MANIFEST))
    assert job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["securityContext"]["fsGroup"] == int(user)


def test_the_image_has_the_files_that_the_package_is_built_from_and_no_others():
    """No virtual environment, no results and no history of the working tree."""
    copied = [rest.split() for name, rest in _steps() if name == "COPY"]
    sources = {source for *each, _ in copied for source in each}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = {pattern for pattern in project["tool"]["setuptools"]["packages"]["find"]["include"] if "." not in pattern}
    named = {project["project"]["readme"], *(name.split("/")[0] for name in project["project"]["license-files"])}
    assert sources == {"pyproject.toml", "requirements.txt"} | named | packages
    assert all((ROOT / source).exists() for source in sources)
    # A folder's files, and not the folder, are copied: it needs its name again.
    assert all(each == [each[0]] * 2 for each in copied if (ROOT / each[0]).is_dir())
    assert "setuptools==" in (ROOT / "requirements.txt").read_text()  # without isolation, it must be there
    assert "--no-build-isolation" in IMAGE


@pytest.mark.timeout(120)
def test_ray_knows_the_options_that_are_written():
    known = subprocess.run(  # noqa: S603
        [str(Path(sys.executable).with_name("ray")), "start", "--help"], capture_output=True, text=True, check=True
    ).stdout
    commands = re.findall(r"ray start (?:[^\n]*\\\n)*[^\n]*", GUIDE + SLURM)
    assert len(commands) >= 4
    for option in {found for command in commands for found in re.findall(r"--[a-z-]+", command)}:
        assert option in known, option
