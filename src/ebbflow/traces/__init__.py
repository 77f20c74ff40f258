"""Availability traces: `Trace`, its file formats, seeded generators and published traces by name."""

# Importing published_traces registers its traces.
from ebbflow.traces import published_traces  # noqa: F401
from ebbflow.traces.availability import Trace, TraceStats
from ebbflow.traces.formats import TextFile, read, register_trace_format, write
from ebbflow.traces.synthetic import GENERATORS, load, register_trace

__all__ = [
    "GENERATORS", "TextFile", "Trace", "TraceStats", "load", "read", "register_trace", "register_trace_format", "write",
]  # fmt: skip
