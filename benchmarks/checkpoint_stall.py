"""How long a checkpoint stops the training of a fleet: the copy of the state, beside a training step of the same model.

A transformer with Adam, whose state is three times its weights. `Checkpoints.save` copies the state and returns; a
thread writes it. The peer is `torch.distributed.checkpoint.async_save`, which also copies first. Everything is in one
process and takes turns; the numbers are medians. The first save is shown apart: it allocates the memory that the later
ones use again. On a GPU the copy goes into pinned memory, and beside it one into other memory is measured.

    python benchmarks/checkpoint_stall.py --device cuda --width 1536 --layers 12 --samples 64 --turns 5
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from ebbflow.live.checkpoints import Checkpoints

LIMIT = 1.0  # steps


def seconds(what: Callable[[], object]) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # for what was launched before
    began = time.perf_counter()
    what()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--samples", type=int, default=4, help="sequences of 128 tokens in a step")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    layer = nn.TransformerEncoderLayer(options.width, 12, 4 * options.width, batch_first=True, dropout=0.0)
    model = nn.TransformerEncoder(layer, options.layers, enable_nested_tensor=False).to(options.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-5, fused=True)
    x = torch.randn(options.samples, 128, options.width, device=options.device)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    def state() -> dict[str, object]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    step()
    tensors = [*model.state_dict().values(), *(t for s in optimizer.state.values() for t in s.values())]
    size = sum(tensor.nbytes for tensor in tensors)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        pinned = {"pinned": True, "not pinned": False} if options.device != "cpu" else {"not pinned": False}
        ours = {
            kind: Checkpoints(
                Path(folder) / kind, keep=1, on_event=lambda what, text: print(what, text), pinned=pinned[kind]
            )
            for kind in pinned
        }
        steps, peers = [], []
        saves: dict[str, list[float]] = {kind: [] for kind in ours}
        writes: dict[str, list[float]] = {kind: [] for kind in ours}
        for turn in range(options.turns + 1):
            for kind, checkpoints in ours.items():
                steps += [seconds(step) for _ in range(3)]
                saves[kind].append(
                    seconds(lambda turn=turn, to=checkpoints: to.save(state(), step=turn, lineage=0))  # type: ignore[misc]
                )
                writes[kind].append(seconds(checkpoints.wait))
            peer: Any = None

            def save_by_peer(turn: int = turn) -> None:
                nonlocal peer
                peer = dcp.async_save(state(), checkpoint_id=f"{folder}/peer{turn}")

            peers.append(seconds(save_by_peer))
            peer.result()
            shutil.rmtree(f"{folder}/peer{turn}")
        dist.destroy_process_group()
    training, beside = statistics.median(steps), statistics.median(peers[1:])
    device = torch.cuda.get_device_name() if options.device != "cpu" else f"a CPU, {torch.get_num_threads()} threads"
    print(f"state {size / 1e9:.2f} GB on {device}, torch {torch.__version__}; medians")
    print(f"a step takes {training:.4f} s; dcp.async_save stops it for {beside:.4f} s, the first time {peers[0]:.4f} s")
    for kind in ours:
        first, usual = saves[kind][0], statistics.median(saves[kind][1:])
        print(
            f"{kind}: a save stops it for {usual:.4f} s, {usual / training:.2f} steps; the first one for {first:.4f} s"
        )
        print(f"    ratio to dcp.async_save {usual / beside:.2f}; {size / usual / 1e9:.1f} GB/s")
        print(f"    written in the background within {statistics.median(writes[kind][1:]):.2f} s")
    return 0 if statistics.median(saves[next(iter(ours))][1:]) / training <= LIMIT else 1


if __name__ == "__main__":
    raise SystemExit(main())
