"""The launch files parse, have what their schedulers ask for, and name verbs and flags that exist."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import jsonschema
import pytest
import typer
import yaml

from ebbflow.cli.main import app

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
DOCS = DEPLOY.parent / "docs"


def documents(path: Path) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def kubernetes(kind: str) -> dict[str, Any]:
    (found,) = (document for document in documents(DEPLOY / "kubernetes" / "fleet.yaml") if document["kind"] == kind)
    return found


def container(kind: str) -> dict[str, Any]:
    (found,) = kubernetes(kind)["spec"]["template"]["spec"]["containers"]
    assert isinstance(found, dict)
    return found


def skypilot_tasks() -> Iterator[tuple[str, dict[str, Any]]]:
    for path in sorted((DEPLOY / "skypilot").glob("*.yaml")):
        for task in documents(path):
            if "execution" not in task:  # the header of a job group
                yield path.name, task


def shell_lines(text: str) -> Iterator[list[str]]:
    """Commands of a shell text that run ebbflow, without comments, as words."""
    for line in text.replace("\\\n", " ").splitlines():
        code = re.sub(r"\$\([^()]*\)", "X", line)  # $(hostname -I) is one word
        if re.match(r"\s*(exec )?ebbflow ", code):
            words = shlex.split(code, comments=True)
            yield words[words.index("ebbflow") :]


def command_lines() -> Iterator[tuple[str, list[str]]]:
    yield "kubernetes lighthouse", container("Deployment")["command"]
    yield "kubernetes replica", container("Job")["command"]
    (jobset,) = documents(DEPLOY / "kubernetes" / "jobset" / "jobset.yaml")
    for job in jobset["spec"]["replicatedJobs"]:
        (one,) = job["template"]["spec"]["template"]["spec"]["containers"]
        yield f"jobset {job['name']}", one["command"]
    for path in sorted(DEPLOY.rglob("*.sbatch")):
        for words in shell_lines(path.read_text()):
            yield path.name, words
    for name, task in skypilot_tasks():
        for words in shell_lines(task["run"]):
            yield name, words
    for path in (DOCS / "deploy.md", *sorted(DOCS.glob("live*.md"))):
        for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", path.read_text(), re.MULTILINE | re.DOTALL):
            if language in ("", "sh"):
                for words in shell_lines(block):
                    yield path.name, words


LINES = list(command_lines())


def test_every_file_has_a_command_line() -> None:
    files = {name for name, _ in LINES}
    assert files >= {"lighthouse.sbatch", "replicas.sbatch", "lighthouse.yaml", "replica.yaml", "group.yaml"}
    assert files >= {"deploy.md", "live.md", "live-operations.md", "live-ranks.md"}


@pytest.mark.parametrize(("file", "words"), LINES, ids=[f"{name}: {' '.join(words)}"[:80] for name, words in LINES])
def test_every_command_line_names_a_real_verb_and_real_flags(file: str, words: list[str]) -> None:
    group = typer.main.get_command(app)
    assert words[0] == "ebbflow"
    context = click.Context(group)
    verb = group.get_command(context, words[1])  # type: ignore[attr-defined]
    assert verb is not None, f"{file}: no verb {words[1]}"
    flags = {flag: option for option in verb.params for flag in option.opts if flag.startswith("-")}
    rest = words[2:]
    while rest:
        word = rest.pop(0)
        if word == "--workload" or word.endswith(".py") or word in ("-m", "--", "$@"):
            break  # from here on the words are the script's, or the ready-made replica's
        if word.startswith("-"):
            assert word in flags, f"{file}: {words[1]} has no option {word}"
            if not getattr(flags[word], "is_flag", False):
                assert rest, f"{file}: {word} lacks its value"
                rest.pop(0)
    given = verb.make_context(words[1], list(words[2:]), parent=context).params
    if given.get("workload"):
        replica = group.get_command(context, "replica")  # type: ignore[attr-defined]
        own = ["--workload", given["workload"], *(given["command"] or [])]
        replica.make_context("replica", own, parent=context)  # fails on an unknown option


def test_the_lighthouse_is_one_on_an_on_demand_node_behind_a_name() -> None:
    deployment, service = kubernetes("Deployment"), kubernetes("Service")
    assert deployment["spec"]["replicas"] == 1
    assert deployment["spec"]["strategy"] == {"type": "Recreate"}
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    assert deployment["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert service["spec"]["type"] == "ClusterIP"
    (port,) = container("Deployment")["ports"]
    assert service["spec"]["ports"][0]["targetPort"] == port["name"]
    join = container("Job")["command"]
    assert join[join.index("--join") + 1] == f"{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"


def test_the_replicas_are_an_indexed_job_on_spot_nodes_that_outlives_them() -> None:
    spec = kubernetes("Job")["spec"]
    pod = spec["template"]["spec"]
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"]
    assert pod["restartPolicy"] == "Never"  # what podFailurePolicy and backoffLimitPerIndex ask for
    assert spec["podFailurePolicy"]["rules"][0] == {
        "action": "Ignore",
        "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
    }
    arguments = container("Job")["command"]
    grace = int(arguments[arguments.index("--grace") + 1].removesuffix("s"))
    assert grace < pod["terminationGracePeriodSeconds"]
    names = {variable["name"] for variable in container("Job")["env"]}
    assert set(re.findall(r"\$\((\w+)\)", " ".join(arguments))) <= names
    terms = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert len(terms) >= 3
    tolerated = {toleration["key"] for toleration in pod["tolerations"]}
    assert {"cloud.google.com/gke-spot", "kubernetes.azure.com/scalesetpriority"} <= tolerated
    (volume,) = pod["volumes"]
    claim = kubernetes("PersistentVolumeClaim")
    assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    assert container("Job")["volumeMounts"] == [
        {"name": volume["name"], "mountPath": arguments[arguments.index("--out") + 1]}
    ]


def test_only_the_fleet_reaches_the_fleet() -> None:
    policy = kubernetes("NetworkPolicy")["spec"]
    own = {"app": "ebbflow"}
    assert policy["policyTypes"] == ["Ingress"]
    assert policy["podSelector"] == {"matchLabels": own}
    assert policy["ingress"] == [{"from": [{"podSelector": {"matchLabels": own}}]}]
    for kind in ("Deployment", "Job"):
        assert own.items() <= kubernetes(kind)["spec"]["template"]["metadata"]["labels"].items()


def test_every_kubernetes_document_has_what_the_server_asks_for() -> None:
    kinds = {
        "PersistentVolumeClaim": "v1", "Deployment": "apps/v1", "Service": "v1", "Job": "batch/v1",
        "NetworkPolicy": "networking.k8s.io/v1",
    }  # fmt: skip
    found = documents(DEPLOY / "kubernetes" / "fleet.yaml")
    assert {document["kind"]: document["apiVersion"] for document in found} == kinds
    for document in found:
        assert re.fullmatch(r"[a-z0-9-]+", document["metadata"]["name"])
    for kind in ("Deployment", "Job"):
        assert {"name", "image", "command"} <= container(kind).keys()
        assert container(kind)["securityContext"]["runAsNonRoot"] is True


def test_skypilot_tasks_are_valid_and_open_no_port() -> None:
    """By the schemas of SkyPilot itself, which refuse unknown fields; `$NAMES` in a task are its own or SkyPilot's."""
    schemas = json.loads((Path(__file__).parent / "schemas" / "skypilot" / "schemas.json").read_text())
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"name": "x", "rum": "true"}, schemas["task"])
    for file, task in skypilot_tasks():
        jsonschema.validate(task, schemas["task"])
        jsonschema.validate(task["resources"], schemas["resources"])
        for mounted in task.get("file_mounts", {}).values():
            jsonschema.validate(mounted, schemas["storage"])
        assert "ports" not in task["resources"]  # SkyPilot opens them to the whole internet
        assert task["resources"]["use_spot"] == ("lighthouse" not in task["name"]), file
        used = set(re.findall(r"\$([A-Z_]+)", task["run"]))
        assert used - {"SKYPILOT_JOBGROUP_NAME"} <= set(task.get("envs", {}))


def test_the_job_group_ends_with_its_replicas_which_find_the_lighthouse_by_its_name() -> None:
    header, *tasks = documents(DEPLOY / "skypilot" / "group.yaml")
    assert header.keys() == {"name", "execution", "primary_tasks", "termination_delay"}
    assert header["execution"] == "parallel"
    lighthouse, *replicas = tasks
    assert lighthouse["name"] == "lighthouse"
    assert header["primary_tasks"] == [task["name"] for task in replicas]
    port = re.search(r":(\d+)", lighthouse["run"])[1]  # type: ignore[index]
    one = {**replicas[0], "name": "", "run": replicas[0]["run"].replace(" r0 ", " NAME ")}
    for task in replicas:
        assert f'"lighthouse-0.$SKYPILOT_JOBGROUP_NAME:{port}" --name {task["name"]} ' in task["run"]
        assert {**task, "name": "", "run": task["run"].replace(f" {task['name']} ", " NAME ")} == one


@pytest.mark.process
def test_slurm_scripts_are_bash_with_options_before_the_first_command() -> None:
    bash = shutil.which("bash")
    assert bash
    for path in (DEPLOY / "slurm").glob("*.sbatch"):
        subprocess.run([bash, "-n", path], check=True)
        lines = path.read_text().splitlines()
        assert lines[0] == "#!/bin/bash"
        last_option = max(i for i, line in enumerate(lines) if line.startswith("#SBATCH --"))
        assert all(line.startswith("#") for line in lines[: last_option + 1])
    options = (DEPLOY / "slurm" / "replicas.sbatch").read_text()
    for option in ("--array=", "--requeue", "--signal=B:TERM@"):
        assert f"#SBATCH {option}" in options


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """A node with stand-ins for ebbflow, which says how it was called, and for the programs of Slurm."""
    programs = tmp_path / "bin"
    programs.mkdir()
    waiting = """trap 'echo left; exit 3' TERM; touch "$FOLDER/ready"; while true; do sleep 0.05; done"""
    for name, text in {
        "ebbflow": f'printf "%s\\n" "$@"\n[ "$WAITS" = no ] || {{ {waiting}; }}',
        "squeue": 'echo "$STATE"',
        "scontrol": 'echo "scontrol $*"',
    }.items():
        (programs / name).write_text(f"#!/bin/bash\n{text}\n")
        (programs / name).chmod(0o755)
    folder = tmp_path / "job folder"
    (folder / "lighthouse").mkdir(parents=True)
    (folder / "lighthouse" / "address").write_text("10.0.0.7:4242")
    numbers = {"SLURM_ARRAY_TASK_ID": "3", "SLURM_JOB_ID": "17", "STATE": "RUNNING", "WAITS": "no"}
    return {"PATH": f"{programs}:/usr/bin:/bin", "FOLDER": str(folder), **numbers}


@pytest.mark.process
def test_the_slurm_replica_runs_ebbflow_with_its_number_and_the_arguments_it_got(slurm: dict[str, str]) -> None:
    script = ["bash", DEPLOY / "slurm" / "replicas.sbatch", "train.py", "--lr", "0.1"]
    result = subprocess.run(script, env=slurm, check=True, text=True, capture_output=True, timeout=150)
    assert result.stdout.splitlines() == [
        "launch", "--join", "10.0.0.7:4242", "--name", "r3", "--out", slurm["FOLDER"], "--grace", "45s", "train.py",
        "--lr", "0.1",
    ]  # fmt: skip


@pytest.mark.process
@pytest.mark.parametrize("state", ["RUNNING", "CANCELLED"])
def test_a_slurm_replica_whose_time_is_up_leaves_and_is_requeued_unless_it_was_cancelled(
    state: str, slurm: dict[str, str]
) -> None:
    script = ["bash", DEPLOY / "slurm" / "replicas.sbatch", "train.py"]
    with subprocess.Popen(
        script, env=slurm | {"STATE": state, "WAITS": "yes"}, text=True, stdout=subprocess.PIPE
    ) as job:
        while not (Path(slurm["FOLDER"]) / "ready").exists():
            assert job.poll() is None
            time.sleep(0.02)
        job.send_signal(signal.SIGTERM)
        said, _ = job.communicate(timeout=150)
    assert said.splitlines()[-2:] == (["left", "scontrol requeue 17"] if state == "RUNNING" else ["train.py", "left"])
    assert job.returncode == 3
