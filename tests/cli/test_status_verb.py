"""`ebbflow status` where no lighthouse answers: what the files of the job say, for people and for scripts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.answers import Ebbflow
from ebbflow.live.protocol import ReplicaStatus

ADDRESS = "127.0.0.1:1"
"""A port of this machine at which nothing listens."""


def make_job(**states: str) -> Path:
    """The folder of a job, with a status file of each replica."""
    folder = Path("job")
    folder.mkdir()
    (folder / "fleet.json").write_text(json.dumps({"lighthouse": ADDRESS}))
    for name, state in states.items():
        path = folder / "replicas" / name / "status.json"
        path.parent.mkdir(parents=True)
        path.write_text(ReplicaStatus(state=state, time=0.0, step=7, batch=64).to_json())
    return folder


@pytest.mark.parametrize("states", [{"r0": "training", "r1": "left"}, {}], ids=["with files", "without files"])
def test_the_json_says_that_no_lighthouse_answers_and_what_the_files_say(
    ebbflow: Ebbflow, states: dict[str, str]
) -> None:
    answer = ebbflow("status", make_job(**states), "--json")
    found = json.loads(answer.out)
    assert found["problem"].startswith(f"no lighthouse answers at {ADDRESS} (")
    assert (found["lighthouse"], found["quorum"]) == (ADDRESS, None)
    assert {member["name"]: member["state"] for member in found["members"]} == states
    assert (found["step"], found["batch"]) == ((7, 64) if states else (None, None))
    answer.assert_refused(f"error: {found['problem']}\n")
    assert "quorum" not in answer.err, "no table beside the JSON"


def test_the_json_says_it_of_an_address_alone(ebbflow: Ebbflow) -> None:
    answer = ebbflow("status", ADDRESS, "--json")
    assert answer.code == 2
    assert json.loads(answer.out)["problem"].startswith("no lighthouse answers")
    assert json.loads(answer.out)["members"] == []


def test_a_finished_job_needs_no_lighthouse(ebbflow: Ebbflow) -> None:
    found = ebbflow("status", make_job(r0="finished", r1="left"), "--json").json
    assert (found["problem"], found["finished"], found["step"]) == (None, True, 7)
    table = ebbflow("status", "job")
    assert table.text.startswith(f"the job is finished, and its lighthouse {ADDRESS} has ended\n")
    assert "r0       finished" in table.text and table.err == ""
    for misleading in ("quorum", "alive", "batch", "one more worker"):
        assert misleading not in table.text


def test_of_a_job_that_was_stopped_it_says_that_it_can_be_continued(ebbflow: Ebbflow) -> None:
    answer = ebbflow("status", make_job(r0="left", r1="left"))
    answer.assert_refused(f"no lighthouse answers at {ADDRESS}, since the job was stopped; the command that started it")


def test_people_get_the_table_in_front_of_the_error(ebbflow: Ebbflow) -> None:
    answer = ebbflow("status", make_job(r0="training"))
    answer.assert_refused(
        f"lighthouse {ADDRESS} does not answer", "r0       training", f"error: no lighthouse answers at {ADDRESS} ("
    )
    assert answer.out == ""


def test_an_address_without_files_gives_the_error_alone(ebbflow: Ebbflow) -> None:
    answer = ebbflow("status", ADDRESS)
    assert (answer.code, answer.out) == (2, "")
    assert answer.err.startswith("error: no lighthouse answers")
