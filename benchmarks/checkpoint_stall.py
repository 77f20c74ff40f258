"""How long a checkpoint stops the training of a fleet: the copy of the state, beside a training step of the same model.

A transformer with Adam, whose state is three times its weights. `Checkpoints.save` copies the state and returns; a
thread writes it. The peer is `torch.distributed.checkpoint.async_save`, which also copies first. Everything is in one
process and takes turns; the numbers are medians. The first save is shown apart: it allocates the memory that the later
ones use again.
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

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from ebbflow.live.checkpoints import Checkpoints

LIMIT = 1.0  # steps


def seconds(what: Callable[[], object]) -> float:
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
        ours = Checkpoints(Path(folder) / "ours", keep=1, on_event=lambda what, text: print(what, text))
        steps, saves, writes, peers = [], [], [], []
        for turn in range(options.turns + 1):
            steps += [seconds(step) for _ in range(3)]
            saves.append(seconds(lambda turn=turn: ours.save(state(), step=turn, lineage=0)))
            writes.append(seconds(ours.wait))
            began = time.perf_counter()
            peer = dcp.async_save(state(), checkpoint_id=f"{folder}/peer{turn}")
            peers.append(time.perf_counter() - began)
            peer.result()
            shutil.rmtree(f"{folder}/peer{turn}")
        dist.destroy_process_group()
    first, usual = saves[0], statistics.median(saves[1:])
    training, beside = statistics.median(steps), statistics.median(peers[1:])
    threads = torch.get_num_threads()
    print(f"state {size / 1e9:.2f} GB on {options.device}, torch {torch.__version__}, {threads} threads; medians")
    print(f"a step takes {training:.3f} s")
    print(f"a save stops it for {usual:.3f} s, {usual / training:.2f} steps; the first one for {first:.3f} s")
    print(f"written in the background within {statistics.median(writes[1:]):.2f} s")
    print(f"dcp.async_save stops it for {beside:.3f} s: ratio {usual / beside:.2f}")
    return 0 if usual / training <= LIMIT else 1


if __name__ == "__main__":
    raise SystemExit(main())
