"""The mean gradient over ranks with uneven shares, and its statistics, in one all-reduce.

Gradients are weighted with the rank's share of the step's samples and laid out in one persistent buffer; what was
measured rides behind them in the same message. A number more a layer costs nothing beside the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist

from ebbflow.errors import ConfigError, RankLost
from ebbflow.moments.estimate import Measurement
from ebbflow.moments.meters import Meter, squared_norms

__all__ = ["AllReduce"]


class AllReduce:
    """Combines the gradients of ranks; made once, on every rank with the same parameters in the same order.

        combine = AllReduce(model.parameters(), meter=meter)
        ...                                                       # backward over this rank's micro_batches
        measurement = combine(samples=own, batch=all_of_them)     # .grad is now the mean over the whole step

    Guarantees: the sample-weighted mean, for any shares, also where a rank has no sample and no gradient; the same
    numbers on every rank; one collective and, with a meter, one host synchronisation a step. A parameter that has no
    gradient on any rank has none afterwards, as in one process, so that neither decay nor momentum moves it; a rank
    that lacks a gradient waits for the device once more to know. Afterwards `.grad` of a parameter is a view into the
    buffer where the types allow, so nothing is copied back: it is overwritten by the next call, like any gradient by
    the next step. Costs one copy of the gradients in memory. Sparse gradients are refused. Without an initialised
    process group it works as the only rank.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        *,
        meter: Meter | None = None,
        group: dist.ProcessGroup | None = None,
        riders: int = 0,
        reduce: Callable[[torch.Tensor], None] | None = None,
    ) -> None:
        """`meter`: has measured the same parameters; None, or one that is off: nothing is measured and nothing paid.

        A meter is on or off on all ranks alike.

        `riders`: so many numbers of the caller's own are added up in the same message. `reduce`: adds up a tensor over
        the ranks in place, for those whose ranks are not a group of `torch.distributed`.
        """
        self.parameters = tuple(parameters)
        self.meter = meter
        self.group = group
        self._reduce = reduce or self._all_reduce
        self._rider_count = riders
        if not self.parameters:
            raise ConfigError("there are no gradients to combine: no parameters were given")
        if meter is not None and {*map(id, meter.parameters)} != {*map(id, self.parameters)}:
            raise ConfigError("the meter measures other parameters than those that are combined; give both the same")
        self.renew()

    def renew(self) -> None:
        """Make the buffer anew: after a collective that was given up, which may still write into the old one."""
        # Half-precision gradients are added in float32; double precision stays.
        dtype = torch.float64 if any(p.dtype == torch.float64 for p in self.parameters) else torch.float32
        size = sum(parameter.numel() for parameter in self.parameters)
        extra = self.meter.width + 2 if self.meter is not None else 0
        sizes = [size, extra, len(self.parameters), self._rider_count]
        self._buffer = torch.zeros(sum(sizes), dtype=dtype, device=self.parameters[0].device)
        # The third part counts the ranks that have a gradient, by parameter.
        self._flat, self._extra, self._present, self.riders = self._buffer.split(sizes)  # type: ignore[no-untyped-call]
        parts = self._flat.split([parameter.numel() for parameter in self.parameters])
        self._views = [part.view_as(parameter) for part, parameter in zip(parts, self.parameters, strict=True)]

    def __call__(self, *, samples: int, batch: int) -> Measurement | None:
        """Replace the mean gradient over this rank's `samples` in `.grad` by the mean over all ranks' `batch` samples.

        All ranks call it in every step, those without a sample too. What the caller put into `riders` before is added
        up with it.
        """
        if not 0 <= samples <= batch or batch < 1:
            raise ConfigError(f"this rank has {samples} of a step's {batch} samples; expected 0 to {batch}")
        meter = self.meter if self.meter is not None and self.meter.on else None
        if meter is not None:
            self._put_statistics(meter, samples, batch)
        else:
            self._extra.zero_()
        complete = self._put_gradients(samples / batch)
        self._reduce(self._buffer)
        self._take_gradients(complete)
        return self._measurement(meter, batch) if meter is not None else None

    def _all_reduce(self, buffer: torch.Tensor) -> None:
        if not dist.is_initialized():
            return
        try:
            dist.all_reduce(buffer, group=self.group)
        except RuntimeError as error:
            raise RankLost(
                "another rank has gone in the middle of a step, killed or out of memory; what was done up to the "
                "last checkpoint is kept, and the same command continues from there"
            ) from error

    def _put_statistics(self, meter: Meter, samples: int, batch: int) -> None:
        tally = meter.take()
        if tally.samples != samples:
            raise ConfigError(
                f"this rank closed micro-batches of {tally.samples} samples, but says that it has {samples}"
            )
        self._extra[:-2].copy_(tally.squares).div_(batch)
        self._extra[-2] = tally.micro_batches
        self._extra[-1:].copy_(tally.mismatch)

    @torch.no_grad()
    def _put_gradients(self, weight: float) -> bool:
        """Whether this rank has a gradient for every parameter."""
        if weight == 0:
            self._flat.zero_()  # whatever an idle rank has in .grad, a NaN too
            self._present.zero_()
            return False
        for parameter, view in zip(self.parameters, self._views, strict=True):
            gradient = parameter.grad
            if gradient is None:
                view.zero_()
            elif gradient.is_sparse:
                raise ConfigError(
                    f"a gradient of shape {tuple(gradient.shape)} is sparse; ranks combine dense ones only: "
                    f"use sparse=False in the embedding"
                )
            elif gradient.dtype == view.dtype:
                torch.mul(gradient, weight, out=view)
            else:
                view.copy_(gradient).mul_(weight)
        present = [parameter.grad is not None for parameter in self.parameters]
        if all(present):
            self._present.fill_(1.0)  # no copy to a device
        else:
            self._present.copy_(torch.tensor(present))
        return all(present)

    def _take_gradients(self, complete: bool) -> None:
        """`complete`: every parameter is known to have a gradient."""
        counts = [1.0] * len(self.parameters) if complete else self._present.tolist()
        for parameter, view, count in zip(self.parameters, self._views, counts, strict=True):
            if not parameter.requires_grad:
                continue
            if not count:
                parameter.grad = None
                continue
            parameter.grad = view if parameter.dtype == view.dtype else view.to(parameter.dtype)

    def _measurement(self, meter: Meter, batch: int) -> Measurement:
        if meter.layers:
            place = {id(parameter): view for parameter, view in zip(self.parameters, self._views, strict=True)}
            mean = squared_norms([place[id(parameter)] for parameter in meter.parameters])
        else:
            mean = squared_norms([self._flat])
        *numbers, micro_batches, mismatch = torch.cat([mean.to(self._extra.dtype), self._extra]).tolist()
        meter.check(mismatch)
        layers = len(numbers) // 2
        return Measurement(
            batch=batch,
            micro_batches=round(micro_batches),
            mean_sq=tuple(numbers[layers:]),
            sq_mean=tuple(numbers[:layers]),
        )
