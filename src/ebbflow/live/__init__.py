"""Your own training script in a fleet of real replicas that come and go.

    with ebbflow.live.join(model, optimizer, data, local_batch=32, epochs=10) as fleet:
        for step in fleet:                              # until all epochs are done, whoever comes and goes
            for x, y in step:                           # this replica's micro-batches of the step
                step.backward(loss_fn(model(x), y))

Start it with `ebbflow launch`. A replica that is killed costs the others about a second and no sample; one that is
told to leave (SIGTERM) finishes its step first; a new one receives the complete state from a peer.

    protocol       addresses, environment, status files and the lighthouse's page          both sides
    membership     who takes part in a step and whose state counts: a pure state machine   the replica
    equality       whether replicas have the same model, data and weights
    connection     executes its instructions; registration, fleet_questions, rendezvous, peer_watch, state_transfer:
                   its parts (torchft_api, engines/process_group)
    live_engine    the engine contract on a fleet
    live_session   the training loop of a replica, and its state; replica_files: record, status, checkpoints
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
    from ebbflow.live.live_session import LiveSession as LiveSession
    from ebbflow.live.live_session import join as join
    from ebbflow.live.live_session import join_workload as join_workload
    from ebbflow.live.protocol import ReplicaConfig as ReplicaConfig

_HOME = {
    "Account": "accounting",
    "LiveSession": "live_session",
    "ReplicaConfig": "protocol",
    "account": "accounting",
    "join": "live_session",
    "join_workload": "live_session",
    "read_fleet": "accounting",
}

__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    # Imported on first use: whoever only reads the records of a fleet needs no torch.
    if name not in _HOME:
        raise AttributeError(f"module 'ebbflow.live' has no attribute {name!r}; public names: {', '.join(__all__)}")
    return getattr(importlib.import_module(f"ebbflow.live.{_HOME[name]}"), name)
