"""Your own training script in a fleet of real replicas that come and go.

    with ebbflow.live.join(model, optimizer, data, local_batch=32, epochs=10) as fleet:
        for step in fleet:                              # until all epochs are done, whoever comes and goes
            for x, y in step:                           # this replica's micro-batches of the step
                step.backward(loss_fn(model(x), y))

Start it with `ebbflow launch`. A replica that is killed costs the others about a second and no sample; one that is
told to leave (SIGTERM) finishes its step first; a new one receives the complete state from a peer.

    protocol       addresses, environment, status files and the lighthouse's page          both sides
    membership     who takes part in a step and whose state counts: a pure state machine   the replica
    connection     executes its instructions (torchft_api, engines/process_group)
    engine         the engine contract on a fleet
    state, replica_files, fleet, joining, worker      state, files, training loop, ready-made replica
    processes      child processes and the lighthouse                                      the launcher
    supervisor     starts, watches and restarts replicas
    launcher, trace_replay, fleet_status, accounting  what the verbs do
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ebbflow.live.accounting import Account as Account
    from ebbflow.live.accounting import account as account
    from ebbflow.live.accounting import read_fleet as read_fleet
    from ebbflow.live.fleet import Fleet as Fleet
    from ebbflow.live.fleet import Step as Step
    from ebbflow.live.joining import join as join
    from ebbflow.live.protocol import ReplicaConfig as ReplicaConfig

_HOME = {
    "Account": "accounting",
    "Fleet": "fleet",
    "ReplicaConfig": "protocol",
    "Step": "fleet",
    "account": "accounting",
    "join": "joining",
    "read_fleet": "accounting",
}

__all__ = ["Account", "Fleet", "ReplicaConfig", "Step", "account", "join", "read_fleet"]


def __getattr__(name: str) -> Any:
    # Imported on first use: whoever only reads the records of a fleet needs no torch.
    if name not in _HOME:
        raise AttributeError(f"module 'ebbflow.live' has no attribute {name!r}; public names: {', '.join(__all__)}")
    return getattr(importlib.import_module(f"ebbflow.live.{_HOME[name]}"), name)
