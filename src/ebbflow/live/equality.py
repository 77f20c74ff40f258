"""Whether replicas are the same: what their models are made of, what their data are, and what their weights are.

Replicas compute the same steps only if model, data and optimizer are the same in each. Structure and data are compared
before they connect; weights travel as one number with the message of a step every `CHECK_EVERY` steps.
"""

from __future__ import annotations

import functools
import hashlib
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from ebbflow.live.agreement import UNKNOWN
from ebbflow.live.model_code import describe_class, describe_functions, describe_settings
from ebbflow.run.checkpoint import add_content
from ebbflow.workloads.sources import Source

__all__ = ["CHECK_EVERY", "different_ranks", "memory_formats", "sample_digest", "structure_digest", "weights_number"]

CHECK_EVERY = 100
"""Steps from one comparison of the weights to the next."""
_SAMPLES = 8
_NUMBERS = (1 << 16) - 1
"""How many numbers a digest of weights can be. The sum of those of 256 replicas is exact in float32."""
_PIECE = 1 << 20
# Never 64 bits at once: of a product with the first bit, the sign, only one bit would be left.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}


def structure_digest(model: torch.nn.Module) -> str:
    """Give a digest of what a model is made of, besides the shapes of its tensors.

    It depends on names, classes and settings of all modules (as they print them, and as their constructors took them),
    on the code of their constructors, of their `forward` and of the methods that these use, on functions among their
    attributes such as `self.act = F.relu`, on names, shapes and types of buffers, and on the content of buffers that
    are not part of `state_dict`, which no peer sends. It does not depend on weights, nor on other attributes, other
    functions that the code calls and global variables. `model_code.py` has the details.

    >>> first, second = torch.nn.Sequential(torch.nn.ReLU()), torch.nn.Sequential(torch.nn.Tanh())
    >>> structure_digest(first) == structure_digest(second)
    False
    """
    digest, classes = hashlib.sha256(), dict[type, str]()
    for name, module in model.named_modules():
        kind = type(module)
        if kind not in classes:
            classes[kind] = repr(describe_class(kind))
        printed = re.sub(r"0x[0-9a-f]+", "", module.extra_repr())  # addresses differ between processes
        settings, functions = describe_settings(module), describe_functions(module)
        digest.update(repr((name, kind.__qualname__, printed, settings, functions, classes[kind])).encode())
        for key, buffer in module.named_buffers(recurse=False):
            digest.update(repr((name, key, tuple(buffer.shape), str(buffer.dtype))).encode())
            if key in module._non_persistent_buffers_set:
                add_content(digest, buffer)
    return digest.hexdigest()[:12]


def memory_formats(parameters: Iterable[torch.Tensor]) -> str:
    """Say in which order the numbers of parameters lie in memory, in few words: their gradients are added up as they
    lie.

    >>> image_filters = torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last)
    >>> memory_formats([image_filters, torch.zeros(2)])
    'torch.channels_last: 1'
    """
    kinds = Counter(_memory_format(parameter) for parameter in parameters if not parameter.is_contiguous())
    return ", ".join(f"{kind}: {count}" for kind, count in sorted(kinds.items())) or "contiguous"


def _memory_format(parameter: torch.Tensor) -> str:
    if parameter.dim() == 4 and parameter.is_contiguous(memory_format=torch.channels_last):
        return str(torch.channels_last)
    return f"strides {tuple(parameter.stride())} of the shape {tuple(parameter.shape)}"


def sample_digest(source: Source) -> str:
    """Give a digest of eight samples, evenly spaced; `UNKNOWN` if they cannot be read, or differ when read again.

    Torch's, numpy's and Python's global generators are left as they were.
    """
    count = len(source)
    indices = np.unique(np.linspace(0, count - 1, min(_SAMPLES, count)).astype(np.int64))
    before = torch.random.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        first, again = (_read(source, indices) for _ in range(2))
    except Exception:  # whatever a data set raises is raised again where the sample is needed
        return UNKNOWN
    finally:
        torch.random.set_rng_state(before[0])
        np.random.set_state(before[1])
        random.setstate(before[2])
    return first if first == again else UNKNOWN


def _read(source: Source, indices: Any) -> str:
    torch.default_generator.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    digest = hashlib.sha256()
    add_content(digest, source.batch(indices, train=False))
    return digest.hexdigest()[:12]


@torch.no_grad()
def weights_number(
    parameters: Iterable[torch.Tensor], step: int, *, gather: Callable[[str], list[str]] = lambda own: [own]
) -> int:
    """Give a number from 1 to 65535 by the bits of all parameters, and the step.

    `gather`: collects what the ranks of a replica say, each about the shards or copies that it holds. Every element is
    multiplied with a pseudo-random number that depends on its position. Of differences that do not depend on these
    numbers, in whichever elements, one case in 65535 gives the same number; the step makes it another case at the
    next comparison. Devices do not matter. Costs one pass over the parameters, in pieces of a million elements, and one
    synchronisation with their device; a parameter that is not contiguous is copied.
    """
    sums = []
    for parameter in parameters:
        own = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        own = own.resolve_conj().resolve_neg()  # of others the bits do not say the number
        numbers = torch.view_as_real(own) if own.is_complex() else own
        places = _place_numbers(numbers.device)
        integers = numbers.reshape(-1).view(_INTEGERS[numbers.element_size()])
        # Integers overflow alike on all devices, and their sum does not depend on the order.
        sums += [torch.mul(piece, places[: len(piece)]).sum() for piece in integers.split(_PIECE)]
    own_digest = hashlib.sha256(repr(torch.stack(sums).tolist() if sums else []).encode()).hexdigest()
    said = repr((step, gather(own_digest)))
    return 1 + int.from_bytes(hashlib.sha256(said.encode()).digest()[:8], "big") % _NUMBERS


@functools.lru_cache(maxsize=1)
def _place_numbers(device: torch.device) -> torch.Tensor:
    """One number of 64 pseudo-random bits for each element of a piece, the same everywhere."""
    return torch.from_numpy(np.random.PCG64(0).random_raw(_PIECE).view(np.int64)).to(device)


def different_ranks(numbers: Sequence[int | None]) -> list[int]:
    """Name the ranks whose weights differ from those of most; of equally many, the lower rank is right.

    `numbers`: `weights_number` by rank; None where it is not known, since the replica has just joined.

    >>> different_ranks([7, 9, 9, None]), different_ranks([7, 9]), different_ranks([None, 9])
    ([0], [1], [])
    """
    known = [number for number in numbers if number is not None]
    if not known:
        return []
    counted = Counter(known)
    right = max(known, key=lambda number: counted[number])  # the first of the largest
    return [rank for rank, number in enumerate(numbers) if number is not None and number != right]
