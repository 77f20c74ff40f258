"""Availability traces that others have published, by name.

Their files lie in the folder `published`, in the canonical format and with the licence of their author. They are
converted from `gcp_traces` of https://github.com/eth-easl/elastic-learning-rate-evaluation, (c) 2022 Joel André,
BSD-3-Clause: only changes are kept, and the observation ends one sampling interval after its last sample.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from ebbflow.core.units import Seconds
from ebbflow.traces.availability import Trace
from ebbflow.traces.formats import TextFile, canonical
from ebbflow.traces.synthetic import register_trace

__all__ = ["gcp_a100", "gcp_tpuv2"]

_BEGINNING = Seconds(0.0)
_SHUT_DOWN = Seconds(13104.0)
_SOURCE = "Andre, Strati, Klimovic 2022"


@register_trace("gcp-a100-2022-05", cite=_SOURCE)
def gcp_a100(start: Seconds = _BEGINNING, stop: Seconds = _SHUT_DOWN, max_workers: int | None = None) -> Trace:
    """Published: a request for 56 A100 on GCP spot in May 2022, 29 to 56 workers, sampled every 63 s for 3.6 h.

    The part from `start` to `stop`, with counts scaled such that the largest of the part is `max_workers`. By default
    it ends at 13,104 s: in the last 7.4 minutes the count falls to 0, which looks like the collection being shut down.
    All of it: `stop=13545s`.
    """
    return _part("gcp_a100_2022-05.csv", start, stop, max_workers)


@register_trace("gcp-tpuv2-2022-04", cite=_SOURCE)
def gcp_tpuv2(start: Seconds = _BEGINNING, stop: Seconds | None = None, max_workers: int | None = None) -> Trace:
    """Published: a request for 120 TPU v2 cores on GCP spot in April 2022, 24 to 120 workers, every 30 s for 16.1 h.

    A machine has 8 cores, so the count is a multiple of 8. The part from `start` to `stop` or the end, with counts
    scaled such that the largest of the part is `max_workers`.
    """
    return _part("gcp_tpuv2_2022-04.csv", start, stop, max_workers)


def _part(name: str, start: Seconds, stop: Seconds | None, max_workers: int | None) -> Trace:
    text = resources.files("ebbflow.traces").joinpath("published", name).read_text(encoding="utf-8")
    part = canonical(TextFile(path=Path(name), text=text)).slice(start, stop)
    return part if max_workers is None else part.scale(max_workers=max_workers)
