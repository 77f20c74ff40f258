"""The Kubernetes files are valid by the published schemas of Kubernetes, JobSet and Kueue."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

kubernetes_validate = pytest.importorskip("kubernetes_validate")

FILES = Path(__file__).resolve().parents[2] / "deploy" / "kubernetes"
SCHEMAS = {
    (body["apiVersion"], body["kind"]): body["schema"]
    for body in (json.loads(path.read_text()) for path in Path(__file__).with_name("schemas").glob("*.json"))
}
VERSION = "1.33"
DOCUMENTS = [
    (path.relative_to(FILES), document)
    for path in sorted(FILES.rglob("*.yaml"))
    if path.name != "kustomization.yaml"
    for document in yaml.safe_load_all(path.read_text())
]


def strict(schema: Any) -> Any:
    """The schema with unknown fields refused, as the API server does with `--validate=strict`."""
    if isinstance(schema, list):
        return [strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {key: strict(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object":
        known = bool(schema["properties"]) and not schema.get("x-kubernetes-preserve-unknown-fields")
        if known and "additionalProperties" not in schema and set(schema["properties"]) != {"apiVersion", "kind"}:
            inner["additionalProperties"] = False
    return inner


def check(document: dict[str, Any]) -> None:
    own = SCHEMAS.get((document["apiVersion"], document["kind"]))
    if own is None:
        kubernetes_validate.validate(document, VERSION, strict=True)
        return
    jsonschema.validate(document, strict(own))
    for job in document["spec"].get("replicatedJobs", ()):
        whole = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": job["name"]}, **job["template"]}
        kubernetes_validate.validate(whole, VERSION, strict=True)


@pytest.mark.parametrize(("path", "document"), DOCUMENTS, ids=[f"{path}: {d['kind']}" for path, d in DOCUMENTS])
def test_a_document_is_valid(path: Path, document: dict[str, Any]) -> None:
    check(document)


def test_wrong_documents_are_not() -> None:
    """That the check can fail: a field that does not exist, in each kind of schema."""
    for kind in ("Job", "JobSet", "ClusterQueue"):
        (document,) = (d for _, d in DOCUMENTS if d["kind"] == kind)
        wrong = {**document, "spec": {**document["spec"], "completionz": 1}}
        with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
            check(wrong)
    (jobset,) = (json.loads(json.dumps(d)) for _, d in DOCUMENTS if d["kind"] == "JobSet")
    jobset["spec"]["replicatedJobs"][1]["template"]["spec"]["template"]["spec"]["restartPolicy"] = 7
    with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
        check(jobset)


def test_kueue_admits_the_job_of_the_base() -> None:
    kustomization = yaml.safe_load((FILES / "kueue" / "kustomization.yaml").read_text())
    for resource in kustomization["resources"]:
        assert (FILES / "kueue" / resource).exists()
    (patch,) = kustomization["patches"]
    changes = yaml.safe_load(patch["patch"])
    (job,) = (d for _, d in DOCUMENTS if d["kind"] == "Job")
    (queue,) = (d for _, d in DOCUMENTS if d["kind"] == "LocalQueue")
    assert patch["target"] == {"kind": "Job", "name": job["metadata"]["name"]}
    assert changes["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": queue["metadata"]["name"]}
    least = int(changes["metadata"]["annotations"]["kueue.x-k8s.io/job-min-parallelism"])
    assert 1 <= least < job["spec"]["parallelism"]
    assert changes["spec"] == {"suspend": True}
