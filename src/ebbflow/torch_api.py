"""Members of torch that are not public: the one module that uses them.

A torch that lacks one of them is refused when this module is imported, and not in the middle of a run; only those of
the compiler and of checkpoints, which take long to import, are looked for when they are first used, and those for a
failed capture are done without.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed
from torch.nn.modules import batchnorm

from ebbflow.errors import ConfigError

if torch.distributed.is_available():
    # Imported later, after init_process_group(), its default arguments would hold the group for ever: the threads of
    # gloo would outlive destroy_process_group(), and one that still frees a tensor while the interpreter ends aborts
    # the process (torch 2.13; pytorch/pytorch#179291).
    import torch.distributed.nn.functional

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store as Store
else:
    Store = getattr(torch.distributed, "Store", object)  # a torch without torch.distributed has none

__all__ = [
    "MINIMUM_VERSION", "USED_MEMBERS", "BatchNorm", "HostCopies", "NormBase", "Store", "check_input_dimensions",
    "clear_failed_capture", "compiler_error", "foreach_add_", "foreach_copy_", "foreach_lerp_", "foreach_mul_",
    "foreach_norm", "foreach_zero_", "gloo_group", "is_sum_over", "mark_dynamic", "missing_members", "prefix_store",
]  # fmt: skip

MINIMUM_VERSION = "2.11"
"""The oldest torch that has all of them; pyproject.toml asks for it."""

USED_MEMBERS = (
    "_C._cuda_endAllocateToPool", "_C._cuda_releasePool", "_dynamo.exc.TorchDynamoException",
    "_dynamo.maybe_mark_dynamic", "_foreach_add_", "_foreach_copy_", "_foreach_lerp_", "_foreach_mul_",
    "_foreach_norm", "_foreach_zero_", "distributed.AllreduceOptions.timeout",
    "distributed.BroadcastOptions.rootRank", "distributed.BroadcastOptions.timeout", "distributed.PrefixStore.set",
    "distributed.ProcessGroupGloo._Options._devices", "distributed.ProcessGroupGloo._Options._timeout",
    "distributed.ProcessGroupGloo.allreduce", "distributed.ProcessGroupGloo.broadcast",
    "distributed.ProcessGroupGloo.create_device", "distributed.ProcessGroupGloo.recv",
    "distributed.ProcessGroupGloo.send", "distributed.Store.check", "distributed.Store.get",
    "distributed.Store.set", "distributed.Store.wait", "distributed.Work.is_completed", "distributed.Work.wait",
    "distributed.checkpoint._state_dict_stager.StateDictStager.stage",
    "nn.BatchNorm2d._check_input_dim", "nn.modules.batchnorm._BatchNorm", "nn.modules.batchnorm._NormBase",
)  # fmt: skip
"""What is used of torch, below `torch.`, that is not public or not documented."""


def missing_members(names: tuple[str, ...] = USED_MEMBERS) -> list[str]:
    """Name the members that the installed torch lacks."""
    return [name for name in names if not _has(torch, name)]


def _has(owner: Any, path: str) -> bool:
    for name in path.split("."):
        if not hasattr(owner, name):
            return False
        owner = getattr(owner, name)
    return True


def _require(names: tuple[str, ...]) -> None:
    if missing := missing_members(names):
        raise ConfigError(
            f"torch {torch.__version__} lacks {', '.join(missing)}, which ebbflow uses; install torch "
            f"{MINIMUM_VERSION} or newer, and if it is newer, a version of ebbflow that supports it"
        )


_COMPILER = tuple(name for name in USED_MEMBERS if name.startswith("_dynamo"))
_CHECKPOINT = tuple(name for name in USED_MEMBERS if name.startswith("distributed.checkpoint"))
_CAPTURE = tuple(name for name in USED_MEMBERS if name.startswith("_C."))
_DISTRIBUTED = tuple(name for name in USED_MEMBERS if name.startswith("distributed") and name not in _CHECKPOINT)
_require(tuple(name for name in USED_MEMBERS if name not in _COMPILER + _CHECKPOINT + _CAPTURE + _DISTRIBUTED))

# Many tensors at once -------------------------------------------------------------------------------------------------

foreach_add_ = torch._foreach_add_
foreach_copy_ = torch._foreach_copy_
foreach_lerp_ = torch._foreach_lerp_
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm
foreach_zero_ = torch._foreach_zero_

# Models ---------------------------------------------------------------------------------------------------------------


BatchNorm = batchnorm._BatchNorm
"""What all batch-norm layers are."""
NormBase = batchnorm._NormBase
"""What all batch-norm and instance-norm layers are."""


def check_input_dimensions(layer: BatchNorm, inputs: torch.Tensor) -> None:
    """Raise ValueError if a batch-norm layer is not made for inputs of so many dimensions."""
    layer._check_input_dim(inputs)  # type: ignore[no-untyped-call]


def mark_dynamic(tensor: torch.Tensor, *dimensions: int) -> None:
    """Let the compiler make one graph for any size of these dimensions, where it can."""
    import torch._dynamo

    for dimension in dimensions:
        torch._dynamo.maybe_mark_dynamic(tensor, dimension)


def compiler_error() -> type[Exception]:
    """The error that a compiled model raises when it cannot be compiled."""
    import torch._dynamo

    _require(_COMPILER)
    return torch._dynamo.exc.TorchDynamoException


def clear_failed_capture(pool: Any, stream: torch.cuda.Stream) -> None:
    """Let a program go on after the capture of a CUDA graph in `pool`, before which `stream` was current, has failed.

    Where the capture itself became invalid, torch 2.11 stops halfway in ending it: its stream stays the current one,
    and the generator takes every later random number for one of the graph and fails ("Offset increment outside graph
    capture"). The allocator, too, is told that nothing is recorded any more, in case it was not.
    """
    torch.cuda.set_stream(stream)
    library: Any = torch._C
    with suppress(AttributeError, RuntimeError):
        # Fails where the capture has been ended, as after an error of the model's own: then the graph, when it is
        # deleted, gives its memory back itself, and a second time would abort the process.
        library._cuda_endAllocateToPool(stream.device_index, pool)
        library._cuda_releasePool(stream.device_index, pool)
    # A capture that succeeds sets the generator right. Should it fail, a model without random numbers can go on.
    with suppress(RuntimeError), torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
        torch.zeros((), device=stream.device)
    torch.cuda.set_stream(stream)  # which it is already, unless this capture failed, too


# Process groups -------------------------------------------------------------------------------------------------------


def prefix_store(prefix: str, store: Store) -> Store:
    """The keys of a store below a prefix."""
    distributed: Any = torch.distributed
    below: Store = distributed.PrefixStore(prefix, store)
    return below


def gloo_group(store: Store, rank: int, size: int, *, host: str, timeout: timedelta) -> Any:
    """Connect a gloo group that listens on one address, and that is not torch's default group."""
    _require(_DISTRIBUTED)
    gloo: Any = torch.distributed.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timeout
    options._devices = [gloo.create_device(hostname=host, lazy_init=False)]
    return gloo(store, rank, size, options)


# Checkpoints ----------------------------------------------------------------------------------------------------------


class HostCopies:
    """Copies states into the memory of the host, and keeps the memory of the last copy for the next one.

    The public class for this, `DefaultStager`, empties its tables after each state in torch 2.11, and ends in a
    KeyError at the next one.
    """

    def __init__(self, *, pinned: bool) -> None:
        from torch.distributed.checkpoint import _state_dict_stager as staging

        _require(_CHECKPOINT)
        self._pinned = pinned
        self._stager: Any = staging.StateDictStager(pin_memory=pinned, share_memory=False)

    def copied(self, state: dict[str, Any]) -> Any:
        """The state with all tensors in the memory of the host; it is complete when this returns."""
        copied = self._stager.stage(state, non_blocking=self._pinned)
        if self._pinned:
            torch.accelerator.synchronize()
        return copied


# Losses ---------------------------------------------------------------------------------------------------------------

_SAME_VALUE = ("AliasBackward0", "CloneBackward0", "SqueezeBackward0", "ToCopyBackward0", "ViewBackward0")
_SUM = 2  # what torch's loss functions save for reduction="sum"


def is_sum_over(loss: torch.Tensor, samples: int) -> bool:
    """Whether a loss ends with a sum over samples: a loss function with reduction="sum", or `.sum()` of a vector.

    Where the graph of the loss says nothing, as with another torch, the answer is False.
    """
    node: Any = loss.grad_fn
    while type(node).__name__ in _SAME_VALUE:
        node = node.next_functions[0][0]
    if type(node).__name__ == "SumBackward0":
        sizes: tuple[int, ...] = getattr(node, "_saved_self_sym_sizes", ())
        over_samples = len(sizes) > 0 and int(sizes[0]) == samples > 1
        return over_samples and not type(node.next_functions[0][0]).__name__.startswith("Mean")
    return bool(getattr(node, "_saved_reduction", None) == _SUM)
