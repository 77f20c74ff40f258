"""Notices that this machine will be taken away: SIGTERM, a file, or the metadata service of AWS, GCP or Azure.

    with PreemptionNotice("aws") as notice:
        while not notice.requested:
            one_step()

A *source* is asked every few seconds whether there is a notice. Its text form names it: `aws`, `gcp`, `azure`,
`file(/run/stop)`; `register_notice` adds others. Proxies of the environment are not used, since metadata services are
reached from the machine itself only.
"""

from __future__ import annotations

import json
import logging
import threading
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from ebbflow.core.plugins import raised_in_plugin
from ebbflow.core.signals import StopSignal
from ebbflow.core.spec import Registry, param

__all__ = ["NOTICES", "NoticeSource", "PreemptionNotice", "register_notice", "watching"]

_LOG = logging.getLogger(__name__)
_EVERY_S = 5.0  # as AWS advises; its notices come two minutes before the end, those of GCP and Azure 30 seconds
_TIMEOUT_S = 2.0
_AWS_TOKEN_S = "21600"


class NoticeSource(ABC):
    """Says whether this machine will be taken away. Subclasses are dataclasses, registered by `register_notice`."""

    @abstractmethod
    def check(self) -> str | None:
        """What the notice says, in a few words; None if there is none. Any Exception: not known, and asked again."""

    def __str__(self) -> str:
        return NOTICES.text(self)


NOTICES: Registry[NoticeSource] = Registry("preemption notice")


def register_notice(name: str, *, cite: str = "") -> Callable[[Any], Any]:
    """Return a decorator that adds a source of notices, a dataclass, to those that can be chosen by name."""
    return NOTICES.register(name, cite=cite)


# Sources --------------------------------------------------------------------------------------------------------------


@register_notice("file")
@dataclass
class FileNotice(NoticeSource):
    """A file whose existence is the notice."""

    path: str = param(doc="the file, which a node's agent or a person creates")

    def check(self) -> str | None:
        """Whether the file is there."""
        return f"{self.path} is there" if Path(self.path).exists() else None


@register_notice("aws", cite="Amazon EC2 user guide, Spot Instance interruption notices")
@dataclass
class AwsNotice(NoticeSource):
    """The interruption of a spot instance on Amazon EC2, two minutes before (IMDSv2, spot/instance-action)."""

    url: str = param("http://169.254.169.254", doc="the instance metadata service")
    _token: str = field(default="", init=False, repr=False)

    def check(self) -> str | None:
        """Ask with a session token, and once more with a new one if it has expired; 404 stands for no notice."""
        for _ in range(2):
            self._token = self._token or self._new_token()
            try:
                text = _get(
                    f"{self.url}/latest/meta-data/spot/instance-action", {"X-aws-ec2-metadata-token": self._token}
                )
            except urllib.error.HTTPError as error:
                if error.code == 404:
                    return None
                if error.code != 401:
                    raise
                self._token = ""
                continue
            action = json.loads(text)
            return f"AWS will {action['action']} this instance at {action['time']}"
        raise OSError("the metadata service refuses the token that it has just given")

    def _new_token(self) -> str:
        headers = {"X-aws-ec2-metadata-token-ttl-seconds": _AWS_TOKEN_S}
        return _get(f"{self.url}/latest/api/token", headers, method="PUT")


@register_notice("gcp", cite="Compute Engine documentation, Preemptible VM instances; Host events")
@dataclass
class GcpNotice(NoticeSource):
    """The preemption of a VM on Google Cloud, or maintenance that terminates it (instance/preempted)."""

    url: str = param("http://metadata.google.internal", doc="the metadata server")

    def check(self) -> str | None:
        """Ask for the two values; a server that is not Google's is an error."""
        if self._value("preempted") == "TRUE":
            return "Google Cloud preempts this VM"
        if self._value("maintenance-event") == "TERMINATE_ON_HOST_MAINTENANCE":
            return "Google Cloud terminates this VM for maintenance"
        return None

    def _value(self, name: str) -> str:
        flavor = {"Metadata-Flavor": "Google"}
        return _get(f"{self.url}/computeMetadata/v1/instance/{name}", flavor, answers=flavor).strip()


@register_notice("azure", cite="Azure documentation, Scheduled Events for Linux VMs")
@dataclass
class AzureNotice(NoticeSource):
    """The eviction of a spot VM on Azure, its deletion, redeployment or reboot (scheduled events)."""

    url: str = param("http://169.254.169.254", doc="the instance metadata service")
    _name: str = field(default="", init=False, repr=False)

    def check(self) -> str | None:
        """Look for an event of this VM: those of the other VMs of its scale set are announced, too."""
        headers = {"Metadata": "true"}
        if not self._name:
            about = f"{self.url}/metadata/instance/compute/name?api-version=2021-02-01&format=text"
            self._name = _get(about, headers).strip()
        text = _get(f"{self.url}/metadata/scheduledevents?api-version=2020-07-01", headers)
        for event in json.loads(text)["Events"]:
            ends = event["EventType"] in ("Preempt", "Terminate", "Redeploy", "Reboot")
            if ends and self._name in event["Resources"]:
                when = f" after {event['NotBefore']}" if event.get("NotBefore") else ""
                return f"Azure announces {event['EventType']} of this VM{when}"
        return None


def _get(url: str, headers: dict[str, str], *, method: str = "GET", answers: dict[str, str] | None = None) -> str:
    """The text at an address. `answers`: headers that the answer must have."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(url, headers=headers, method=method)
    with opener.open(request, timeout=_TIMEOUT_S) as answer:
        for name, value in (answers or {}).items():
            if answer.headers.get(name) != value:
                raise ValueError(f"the answer of {url} has no header {name}: {value}")
        text: str = answer.read(1 << 16).decode()
        return text


# Watching -------------------------------------------------------------------------------------------------------------


def _known(sources: Sequence[str | NoticeSource]) -> list[NoticeSource]:
    return [NOTICES.make(source) if isinstance(source, str) else source for source in sources]


@contextmanager
def watching(
    sources: Sequence[str | NoticeSource], noticed: Callable[[], object], *, every_s: float = _EVERY_S
) -> Iterator[None]:
    """Ask the sources in a thread, and call `noticed` there, once, as soon as one of them has a notice.

    A source that cannot be asked is logged once, and asked again.
    """
    known = _known(sources)
    over = threading.Event()
    failed: set[int] = set()

    def ask(number: int) -> str | None:
        try:
            return known[number].check()
        except Exception as error:  # whatever a server answers, or a source of the user does: others may have a notice
            if number not in failed:
                text = raised_in_plugin(error) or str(error) or type(error).__name__
                _LOG.warning("%s could not be asked for a notice (%s); it is asked again", known[number], text)
            failed.add(number)
            return None

    def watch() -> None:
        while not over.is_set():
            for number in range(len(known)):
                if said := ask(number):
                    _LOG.warning("preemption notice: %s", said)
                    noticed()
                    return
            over.wait(every_s)

    thread = threading.Thread(target=watch, daemon=True, name="ebbflow-notices")
    if known:
        thread.start()
    try:
        yield
    finally:
        over.set()
        if known:
            thread.join(2 * _TIMEOUT_S)


class PreemptionNotice(StopSignal):
    """A request to stop by SIGTERM, Ctrl-C, or a notice of one of the sources; `requested` says whether there was one.

    For a script of your own: stop between two steps as soon as `requested` is true. With several ranks, give it to
    `ElasticOptimizer` as `stop=`, and stop when `stop_requested` is true, which all ranks see after the same step. A
    second signal interrupts at once, unless it only repeats the first one (`StopSignal`); a signal that follows a
    notice does not, since clouds send one then.
    """

    def __init__(self, *sources: str | NoticeSource, every_s: float = _EVERY_S) -> None:
        super().__init__()
        self._sources = _known(sources)
        self._every_s = every_s
        self._watching = ExitStack()

    def __enter__(self) -> Self:
        super().__enter__()
        self._watching.enter_context(watching(self._sources, self.request, every_s=self._every_s))
        return self

    def __exit__(self, *_: object) -> None:
        self._watching.close()
        super().__exit__()
