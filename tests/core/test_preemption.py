"""Notices of clouds, from a server on loopback that answers as their metadata services do."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import threading
import time
import urllib.error
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from ebbflow.core import signals
from ebbflow.core.preemption import NOTICES, NoticeSource, PreemptionNotice
from ebbflow.errors import SpecError

Answer = tuple[int, str, dict[str, str]]
"""Status, body and headers."""
Service = Callable[[str, str, dict[str, str]], Answer]
"""(method, path, headers of the request) -> answer."""

NOT_FOUND: Answer = (404, "", {})


@contextmanager
def serving(service: Service) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            status, body, headers = service(self.command, self.path, dict(self.headers))
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body.encode())

        do_GET = do_PUT = _answer  # noqa: N815

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class Aws:
    """IMDSv2 as its documentation describes it: a session token by PUT, 401 without a valid one, 404 without notice."""

    def __init__(self) -> None:
        self.tokens: list[str] = []
        self.notice = False

    def __call__(self, method: str, path: str, headers: dict[str, str]) -> Answer:
        if (method, path) == ("PUT", "/latest/api/token"):
            if "X-aws-ec2-metadata-token-ttl-seconds".lower() not in {name.lower() for name in headers}:
                return 400, "", {}
            self.tokens.append(f"AQAEA{len(self.tokens)}==")
            return 200, self.tokens[-1], {}
        given = {name.lower(): value for name, value in headers.items()}.get("x-aws-ec2-metadata-token")
        if not self.tokens or given != self.tokens[-1]:
            return 401, "", {}
        if method == "GET" and path == "/latest/meta-data/spot/instance-action" and self.notice:
            return 200, '{"action": "terminate", "time": "2017-09-18T08:22:00Z"}', {}
        return NOT_FOUND


class Gcp:
    """The metadata server: values in plain text, only for those who ask with its header."""

    def __init__(self) -> None:
        self.values = {"preempted": "FALSE", "maintenance-event": "NONE"}

    def __call__(self, method: str, path: str, headers: dict[str, str]) -> Answer:
        if {name.lower(): value for name, value in headers.items()}.get("metadata-flavor") != "Google":
            return 403, "", {}
        name = path.removeprefix("/computeMetadata/v1/instance/")
        return (200, self.values[name], {"Metadata-Flavor": "Google"}) if name in self.values else NOT_FOUND


class Azure:
    """Scheduled events, with the example of the documentation."""

    def __init__(self) -> None:
        self.events: list[dict[str, object]] = []

    def __call__(self, method: str, path: str, headers: dict[str, str]) -> Answer:
        if headers.get("Metadata") != "true":
            return 400, '{ "error": "Bad request. Required metadata header not specified" }', {}
        if path == "/metadata/instance/compute/name?api-version=2021-02-01&format=text":
            return 200, "FrontEnd_IN_0", {}
        if path == "/metadata/scheduledevents?api-version=2020-07-01":
            return 200, json.dumps({"DocumentIncarnation": 1, "Events": self.events}), {}
        return NOT_FOUND

    def announce(self, kind: str, machine: str) -> None:
        self.events.append({
            "EventId": "C7061BAC-AFDC-4513-B24B-AA5F13A16123", "EventStatus": "Scheduled", "EventType": kind,
            "ResourceType": "VirtualMachine", "Resources": [machine], "NotBefore": "Mon, 11 Apr 2022 22:26:58 GMT",
            "Description": "Virtual machine is being evicted.", "EventSource": "Platform", "DurationInSeconds": -1,
        })  # fmt: skip


@pytest.mark.process
def test_aws_announces_the_interruption_of_a_spot_instance() -> None:
    service = Aws()
    with serving(service) as url:
        source = NOTICES.make(f"aws({url})")
        assert source.check() is None
        assert source.check() is None
        assert len(service.tokens) == 1, "a token is used until it expires"
        service.tokens.append("another")  # the one before is no longer valid
        service.notice = True
        assert source.check() == "AWS will terminate this instance at 2017-09-18T08:22:00Z"
        assert len(service.tokens) == 3


@pytest.mark.process
@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("preempted", "TRUE", "Google Cloud preempts this VM"),
        ("maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE", "Google Cloud terminates this VM for maintenance"),
        ("maintenance-event", "MIGRATE_ON_HOST_MAINTENANCE", None),
    ],
)
def test_google_announces_preemption_and_maintenance(name: str, value: str, text: str | None) -> None:
    service = Gcp()
    with serving(service) as url:
        source = NOTICES.make(f"gcp({url})")
        assert source.check() is None
        service.values[name] = value
        assert source.check() == text


@pytest.mark.process
def test_a_server_that_is_not_googles_is_not_believed() -> None:
    with serving(lambda *_: (200, "TRUE", {})) as url, pytest.raises(ValueError, match="no header Metadata-Flavor"):
        NOTICES.make(f"gcp({url})").check()


@pytest.mark.process
def test_azure_announces_events_of_this_machine() -> None:
    service = Azure()
    with serving(service) as url:
        source = NOTICES.make(f"azure({url})")
        assert source.check() is None
        service.announce("Preempt", "FrontEnd_IN_1")  # of another machine of the scale set
        service.announce("Freeze", "FrontEnd_IN_0")  # a pause of seconds
        assert source.check() is None
        service.announce("Preempt", "FrontEnd_IN_0")
        assert source.check() == "Azure announces Preempt of this VM after Mon, 11 Apr 2022 22:26:58 GMT"


@pytest.mark.process
@pytest.mark.parametrize("cloud", ["aws", "gcp", "azure"])
def test_a_machine_of_another_cloud_is_not_taken_for_one_without_a_notice(cloud: str) -> None:
    with serving(lambda *_: NOT_FOUND) as url, pytest.raises(urllib.error.HTTPError, match="404"):
        NOTICES.make(f"{cloud}({url})").check()


# In a script ----------------------------------------------------------------------------------------------------------


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_file_is_a_notice_and_the_signal_that_follows_it_does_not_interrupt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([100.0, 103.0])
    monkeypatch.setattr(signals, "monotonic", lambda: next(times))
    with PreemptionNotice(f"file({tmp_path / 'stop'})", every_s=0.01) as notice:
        assert not notice.requested
        (tmp_path / "stop").touch()
        wait_for(lambda: notice.requested)
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(
    ("sent", "interrupts"),
    [
        (((signal.SIGTERM, 0.0), (signal.SIGTERM, 0.003)), False),  # by Slurm, and by torchrun
        (((signal.SIGTERM, 0.0), (signal.SIGTERM, 1.9)), False),
        (((signal.SIGTERM, 0.0), (signal.SIGTERM, 2.1)), True),
        (((signal.SIGTERM, 0.0), (signal.SIGTERM, 1.5), (signal.SIGTERM, 3.0)), True),  # counted from the first
        (((signal.SIGINT, 0.0), (signal.SIGINT, 0.05)), False),  # by the terminal, and by a parent
        (((signal.SIGINT, 0.0), (signal.SIGINT, 0.2)), True),  # a person who presses Ctrl-C twice
        (((signal.SIGINT, 0.0), (signal.SIGTERM, 0.5)), False),  # a launcher ends what Ctrl-C has not ended yet
        (((signal.SIGTERM, 0.0), (signal.SIGINT, 0.5)), True),
    ],
)
def test_a_signal_that_is_passed_on_does_not_interrupt_and_a_second_one_does(
    sent: tuple[tuple[signal.Signals, float], ...], interrupts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = [100.0 + after_s for _, after_s in sent]
    monkeypatch.setattr(signals, "monotonic", lambda: times.pop(0))
    interrupted = False
    with signals.StopSignal() as stop:
        for number, _ in sent:
            try:
                signal.raise_signal(number)
            except KeyboardInterrupt:
                interrupted = True
        assert stop.requested and not times
    assert interrupted == interrupts


def test_sigterm_is_a_notice() -> None:
    with PreemptionNotice() as notice:
        os.kill(os.getpid(), signal.SIGTERM)
        assert notice.requested


def test_a_notice_can_be_used_in_one_with_after_another(tmp_path: Path) -> None:
    notice = PreemptionNotice(f"file({tmp_path / 'stop'})", every_s=0.01)
    with notice:
        assert not notice.requested
    (tmp_path / "stop").touch()
    with notice:
        wait_for(lambda: notice.requested)


def test_a_service_that_is_not_there_is_named_once_and_asked_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.WARNING),
        PreemptionNotice("aws(http://127.0.0.1:9)", f"file({tmp_path / 'stop'})", every_s=0.01) as notice,
    ):
        time.sleep(0.1)
        (tmp_path / "stop").touch()
        wait_for(lambda: notice.requested)
    messages = [record.getMessage() for record in caplog.records]
    assert len([text for text in messages if "aws(http://127.0.0.1:9) could not be asked for a notice" in text]) == 1
    assert messages[-1] == f"preemption notice: {tmp_path / 'stop'} is there"


@pytest.mark.process
def test_a_service_that_does_not_speak_http_is_named_once_and_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    answers = [b"garbage\r\n\r\n"] * 2
    answers.append(b"HTTP/1.0 200 OK\r\nMetadata-Flavor: Google\r\n\r\nTRUE")
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            for answer in answers:
                connection, _ = server.accept()
                with connection:
                    connection.recv(1 << 16)
                    connection.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        source = f"gcp(http://127.0.0.1:{server.getsockname()[1]})"
        with caplog.at_level(logging.WARNING), PreemptionNotice(source, every_s=0.01) as notice:
            wait_for(lambda: notice.requested)
        thread.join()
    messages = [record.getMessage() for record in caplog.records]
    assert len([text for text in messages if "could not be asked for a notice (garbage" in text]) == 1
    assert messages[-1] == "preemption notice: Google Cloud preempts this VM"


@dataclass
class Broken(NoticeSource):
    """A source of a user that raises whatever it likes, until the third time."""

    asked: int = 0

    def check(self) -> str | None:
        self.asked += 1
        if self.asked < 3:
            raise AssertionError
        return "now it knows"

    def __str__(self) -> str:
        return "broken"


def test_a_source_that_raises_is_named_once_and_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), PreemptionNotice(Broken(), every_s=0.01) as notice:
        wait_for(lambda: notice.requested)
    messages = [record.getMessage() for record in caplog.records]
    assert messages == [
        "broken could not be asked for a notice (AssertionError); it is asked again",
        "preemption notice: now it knows",
    ]


def test_an_unknown_source_is_named() -> None:
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SpecError, match="unknown preemption notice 'asw'; did you mean 'aws'"):
        PreemptionNotice("asw").__enter__()
    assert signal.getsignal(signal.SIGTERM) is handler, "it handles no signals"
