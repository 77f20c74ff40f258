"""Who is available when: `Trace`, its file formats, seeded generators and drawings."""

from ebbflow.traces.formats import read, write
from ebbflow.traces.synthetic import GENERATORS, load
from ebbflow.traces.trace import Trace, TraceStats

__all__ = ["GENERATORS", "Trace", "TraceStats", "load", "read", "write"]
