"""One all-reduce per step: the mean gradient over processes with uneven batches, its statistics, and named numbers.

Each process weights its gradients with its part of the step's samples and lays them out in one persistent buffer. What
it measured and what else the processes tell each other lie behind the gradients in the same buffer: beside a gradient,
a few more numbers cost nothing.

A large model is sent in buckets, as DistributedDataParallel does it. The last parameters, whose gradients a backward
pass finds first, are the first bucket, so that the buckets travel while the backward pass goes on. The numbers beside
the gradient are in the last bucket. All processes send the same buckets in the same order; when each of them begins is
their own affair, so that a process without samples, or without a gradient for some parameter, just begins later."""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ebbflow.engines.base import Gradients
from ebbflow.engines.loss_sum import normalise
from ebbflow.errors import ConfigError, RankLost
from ebbflow.moments.estimate import Measurement
from ebbflow.moments.meters import Meter, squared_norms
from ebbflow.torch_api import foreach_add_, foreach_copy_, foreach_mul_

__all__ = ["AllReduce", "BeginAllReduce", "StepAllReduce", "StepPart", "check_dense", "check_real"]

BeginAllReduce = Callable[[torch.Tensor], Callable[[], None]]
"""Begins to add up a tensor over the processes, in place; the result is called to wait for the sum."""

BUCKET_BYTES = 4 << 20
"""Least size of a bucket, except the last one. On a link of 1 Gbit/s it travels for 34 ms."""


class AllReduce:
    """Combines the gradients of processes; made once, in every process with the same parameters in the same order.

        combine = AllReduce(model.parameters(), meter=meter)
        ...                                                       # backward over this process's micro-batches
        measurement = combine(samples=own, batch=all_of_them)     # .grad is now the mean over the whole step

    Guarantees: the sample-weighted mean, whatever the processes' parts are, also where a process has no sample and no
    gradient; the same numbers in every process; one collective and, with a meter, one host synchronisation per step. A
    parameter that has no gradient in any process has none afterwards, so that neither weight decay nor momentum moves
    it; a process that lacks a gradient waits for the device once more to know. Afterwards `.grad` of a parameter is a
    view into the buffer where the types allow: it is overwritten by the next call, like any gradient by the next step.
    Costs one copy of the gradients in memory, in which each lies as its parameter does (`channels_last` too), so that
    an optimizer can update many tensors at once; in all processes a parameter must lie in memory in the same way.
    Sparse gradients are refused. Without an initialised process group it works as the only process."""

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        *,
        meter: Meter | None = None,
        group: dist.ProcessGroup | None = None,
        fields: Mapping[str, int] | None = None,
        all_reduce: Callable[[torch.Tensor], None] | None = None,
        begin: BeginAllReduce | None = None,
        sources: Sequence[torch.nn.Parameter] | None = None,
        collect: Callable[[int], None] = lambda number: None,
        lengths: Sequence[int] | None = None,
        host_fields: int = 0,
        norm: bool = False,
    ) -> None:
        """`meter` has measured the same parameters. None, or one that is off: nothing is measured and nothing paid.

        A meter is on or off in all processes alike. `fields`: name -> length of further vectors that are added up in
        the same message; write to `combine[name]` before a call and read the sum from it afterwards. `all_reduce` adds
        up a tensor over the processes in place, where they are not a group of `torch.distributed`. With `begin` instead
        the message is sent in buckets, and `overlap` may be used.

        `sources`: the parameters in which a backward pass leaves the gradients, where these are not the given ones;
        `collect(number)` then moves one of them into `.grad` of the given one. `lengths`: the numbers of each parameter
        by which buckets are cut, where a process holds fewer of them and others are to send buckets of the same
        parameters. `host_fields`: the first so many numbers of the fields are copied to the host together with the
        measurement, into `self.host_values`. `norm`: whether `self.norm` is wanted."""
        self.parameters = tuple(parameters)
        self._sources = self.parameters if sources is None else tuple(sources)
        self._collect = collect
        self._lengths = [p.numel() for p in self.parameters] if lengths is None else list(lengths)
        self.meter = meter
        self.group = group
        self._all_reduce = all_reduce or self._by_torch
        self._begin = begin
        self._fields = dict(fields or {})
        self._host_fields = host_fields
        self.host_values: list[float] = []
        """The first numbers of the fields, summed over the processes."""
        self._norm = norm
        self.norm: float | None = None
        """Norm of the mean gradient of the latest step, if it was wanted and the step was not measured."""
        self._indices = {id(parameter): index for index, parameter in enumerate(self._sources)}
        self._hooked = False
        self._arrivals: Counter[int] | None = None  # by parameter: gradients of a backward pass that is watched
        self._missing: list[int] = []  # by bucket: gradients that this pass has not found yet
        self._repeats = False  # whether a parameter gets several gradients in one backward pass
        self._begun: list[Callable[[], None]] = []  # waits for each bucket that is on its way
        self._failure: Exception | None = None
        if not self.parameters:
            raise ConfigError("there are no gradients to combine: no parameters were given")
        check_real(self.parameters)
        if meter is not None and {*map(id, meter.parameters)} != {*map(id, self.parameters)}:
            raise ConfigError("the meter measures other parameters than those that are combined; give both the same")
        self.renew()

    def renew(self) -> None:
        """Make a new buffer, after a collective that was abandoned and may still write into the old one."""
        # Half-precision gradients are added in float32; double precision stays.
        dtype = torch.float64 if any(p.dtype == torch.float64 for p in self.parameters) else torch.float32
        statistics = self.meter.width + 2 if self.meter is not None else 0
        sizes = {
            "gradient": sum(parameter.numel() for parameter in self.parameters),
            "present": len(self.parameters),  # by parameter: the number of processes that have a gradient
            "statistics": statistics,  # squared norms, number of micro-batches, mismatch
        }
        lengths = [*sizes.values(), *self._fields.values()]
        self._buffer = torch.zeros(sum(lengths), dtype=dtype, device=self.parameters[0].device)
        parts = self._buffer.split(lengths)  # type: ignore[no-untyped-call]
        self._flat, self._present, self._statistics = parts[:3]
        read_from = sizes["gradient"] + sizes["present"]
        self._read = self._buffer[read_from : read_from + statistics + self._host_fields]
        """What is read on the host after a step: the statistics, and the first numbers of the fields."""
        self._named: dict[str, torch.Tensor] = dict(zip(self._fields, parts[3:], strict=True))
        backwards = self.parameters[::-1]  # the order in which a backward pass finds the gradients, more or less
        vectors = self._flat.split([parameter.numel() for parameter in backwards])
        self._views = [_lying_as(parameter, part) for part, parameter in zip(vectors, backwards, strict=True)][::-1]
        self._buckets = self._cut(BUCKET_BYTES if self._begin is not None else self._buffer.nbytes)
        self._bucket_of = {index: number for number, (members, _) in enumerate(self._buckets) for index in members}
        self._begun, self._failure, self._arrivals = [], None, None

    def _cut(self, least: int) -> list[tuple[range, torch.Tensor]]:
        """The parameters of each bucket, and its part of the buffer; the last one has everything else, too."""
        size, cuts = self._buffer.element_size(), [(len(self.parameters), 0)]
        offset = length = 0
        for index in range(len(self.parameters) - 1, 0, -1):
            offset += self.parameters[index].numel()
            length += self._lengths[index]
            if length * size >= least:
                cuts.append((index, offset))
                length = 0
        ends = [*cuts[1:], (0, self._buffer.numel())]
        return [
            (range(stop, start), self._buffer[low:high]) for (start, low), (stop, high) in zip(cuts, ends, strict=True)
        ]

    def overlap(self) -> None:
        """Send each bucket as soon as the backward pass that follows has found its gradients; the last pass of a step.

        `.grad`, with what the meter has taken out of it, must then be this process's part of the mean gradient: the
        mean over its samples, times samples/batch. Whatever changes `.grad` after the pass is not seen. The first pass
        of all is only watched: where a parameter gets several gradients in one pass (reentrant checkpointing), every
        bucket waits for the end of the pass.
        """
        if self._begin is None or self._repeats or self._begun or len(self._buckets) == 1:
            return
        self._arrivals = Counter()
        trained = [parameter.requires_grad for parameter in self._sources]
        self._missing = [sum(trained[index] for index in members) for members, _ in self._buckets]
        if not self._hooked:
            me = weakref.ref(self)  # the hooks do not keep this object alive

            def arrived(parameter: torch.Tensor) -> None:
                if (owner := me()) is not None:
                    owner._arrived(parameter)

            hooked: list[Any] = [parameter for parameter in self._sources if parameter.requires_grad]
            handles = [parameter.register_post_accumulate_grad_hook(arrived) for parameter in hooked]
            weakref.finalize(self, lambda: [handle.remove() for handle in handles])

    def _arrived(self, parameter: torch.Tensor) -> None:
        """A gradient is in `.grad`."""
        if self._arrivals is None:
            return
        index = self._indices[id(parameter)]
        self._arrivals[index] += 1
        if not self._hooked:
            return  # the first pass
        if self._arrivals[index] > 1:
            if self._bucket_of[index] < len(self._begun):
                self._failure = ConfigError(
                    f"a parameter of shape {tuple(parameter.shape)} got a second gradient in one backward pass, after "
                    f"the first one was sent; use checkpointing with use_reentrant=False"
                )
            return  # else it is sent with the first one
        self._missing[self._bucket_of[index]] -= 1
        last = len(self._buckets) - 1
        while self._failure is None and len(self._begun) < last and not self._missing[len(self._begun)]:
            self._send_next(1.0)

    def _send_next(self, weight: float) -> None:
        """Begin to add up the next bucket. An error is raised when the step is combined."""
        assert self._begin is not None
        members, part = self._buckets[len(self._begun)]
        try:
            for index in members:
                self._collect(index)
            self._put_gradients(members, weight)
            self._begun.append(self._begin(part) if part.numel() else lambda: None)
        except Exception as error:  # this may be inside of a backward pass, which is to end first
            self._failure = error

    def __getitem__(self, field: str) -> torch.Tensor:
        """A field of the message: what this process says before a call, the sum over all processes after it."""
        return self._named[field]

    def __call__(self, *, samples: float, batch: float, scale: float = 1.0) -> Measurement | None:
        """Replace the mean gradient over this process's `samples` in `.grad` by the mean over all `batch` samples.

        All processes call it in every step, those without a sample too. `scale`: what the mean in `.grad` was
        multiplied with.
        """
        self._check(samples, batch)
        weight = samples / batch / scale
        if self._arrivals is not None and not self._hooked:  # the first backward pass was watched
            self._hooked, self._repeats = True, any(count > 1 for count in self._arrivals.values())
        self._arrivals = None
        complete = self._put_rest(samples=samples, batch=batch, scale=scale)
        if self._begin is None:
            self._put_gradients(range(len(self.parameters)), weight)
            self._all_reduce(self._buffer)
        else:
            while self._failure is None and len(self._begun) < len(self._buckets):
                self._send_next(weight)
            if self._failure is not None:
                raise self._failure
            for wait in self._begun:
                wait()
            self._begun = []
        self._take_gradients(complete)
        return self._read_numbers(batch)

    def listen(self, **fields: torch.Tensor) -> None:
        """Take part in a step with nothing but these fields; neither gradients nor meter are touched.

        The message then holds the sum over all processes. A process can do this that does not know the step.
        """
        self._buffer.zero_()
        for name, values in fields.items():
            self._named[name].copy_(values)
        if self._begin is None:
            self._all_reduce(self._buffer)
            return
        for wait in [self._begin(part) for _, part in self._buckets if part.numel()]:
            wait()

    def fill(self, *, samples: float, batch: float, scale: float = 1.0) -> None:
        """Write this process's part into the message."""
        self._check(samples, batch)
        self._put_rest(samples=samples, batch=batch, scale=scale)
        self._put_gradients(range(len(self.parameters)), samples / batch / scale)

    @staticmethod
    def _check(samples: float, batch: float) -> None:
        if not 0 <= samples <= batch or not batch > 0:
            raise ConfigError(f"this rank has {samples} of a step's {batch} samples; expected 0 to {batch}")

    def _put_rest(self, *, samples: float, batch: float, scale: float) -> bool:
        """Write what lies behind the gradients; whether this process has a gradient for every parameter."""
        meter = self._measuring
        if meter is not None:
            self._put_statistics(meter, samples, batch, scale)
        else:
            self._statistics.zero_()
        present = [samples > 0 and parameter.grad is not None for parameter in self.parameters]
        if all(present) or not any(present):
            self._present.fill_(float(all(present)))  # no copy to a device
        else:
            self._present.copy_(torch.tensor(present))
        return all(present)

    @property
    def _measuring(self) -> Meter | None:
        return self.meter if self.meter is not None and self.meter.on else None

    @property
    def buffer(self) -> torch.Tensor:
        """The whole message: this process's part before a call, the sum over all processes after it."""
        return self._buffer

    def _by_torch(self, buffer: torch.Tensor) -> None:
        if not dist.is_initialized():
            return
        try:
            dist.all_reduce(buffer, group=self.group)
        except RuntimeError as error:
            raise RankLost(
                "another rank has ended in the middle of a step, killed or out of memory; what was done up to the last "
                "checkpoint is kept, and the same command continues from there"
            ) from error

    def _put_statistics(self, meter: Meter, samples: float, batch: float, scale: float) -> None:
        tally = meter.take(scale=scale)
        if tally.samples != samples:
            raise ConfigError(
                f"this rank closed micro-batches of {tally.samples} samples, but says that it has {samples}"
            )
        self._statistics[:-2].copy_(tally.squares).div_(batch)
        self._statistics[-2] = tally.micro_batches
        self._statistics[-1:].copy_(tally.mismatch)

    @torch.no_grad()
    def _put_gradients(self, members: range, weight: float) -> None:
        """Write the gradients of these parameters into the message, with what a meter has taken out of `.grad`."""
        inside = self._measuring if self._arrivals is not None else None  # of a pass that the meter has not closed yet
        views, found, added, earlier = [], [], [], []
        for index in members:
            gradient = self.parameters[index].grad
            if gradient is None or weight == 0:  # whatever an idle process has in .grad, a NaN too
                self._views[index].zero_()
                continue
            if gradient.is_sparse:
                raise ConfigError(
                    f"a gradient of shape {tuple(gradient.shape)} is sparse; only dense gradients can be combined: use "
                    f"sparse=False in the embedding"
                )
            views.append(self._views[index])
            found.append(gradient)
            if inside is not None and (sums := inside.earlier(self.parameters[index])) is not None:
                added.append(self._views[index])
                earlier.append(sums)
        if not views:
            return
        foreach_copy_(views, found)
        if added:
            foreach_add_(added, earlier)
        if weight != 1:
            foreach_mul_(views, weight)

    def _take_gradients(self, complete: bool) -> None:
        """`complete`: every parameter is known to have a gradient."""
        counts = [1.0] * len(self.parameters) if complete else self._present.tolist()
        for parameter, source, view, count in zip(self.parameters, self._sources, self._views, counts, strict=True):
            if not source.requires_grad:
                continue
            if not count:
                parameter.grad = None
                continue
            parameter.grad = view if parameter.dtype == view.dtype else view.to(parameter.dtype)

    def _read_numbers(self, batch: float) -> Measurement | None:
        """Read what is needed on the host, all of it at once: a device is waited for once."""
        meter, squares = self._measuring, torch.zeros(0)
        if meter is not None and meter.layers:
            views = {id(parameter): view for parameter, view in zip(self.parameters, self._views, strict=True)}
            squares = squared_norms([views[id(parameter)] for parameter in meter.parameters])
        elif meter is not None or self._norm:
            squares = squared_norms([self._flat])
        if not len(squares) and not self._host_fields:
            return None
        found = (torch.cat([squares.to(self._read.dtype), self._read]) if len(squares) else self._read).tolist()
        sq_mean, statistics = found[: len(squares)], found[len(squares) : len(found) - self._host_fields]
        self.host_values = found[len(found) - self._host_fields :]
        self.norm = math.sqrt(sq_mean[0]) if self._norm and meter is None else None
        if meter is None:
            return None
        *mean_sq, count, mismatch = statistics
        meter.check(mismatch)
        return Measurement(batch=batch, micro_batches=round(count), mean_sq=tuple(mean_sq), sq_mean=tuple(sq_mean))


def check_real(parameters: Iterable[torch.Tensor]) -> None:
    """Refuse complex parameters: the imaginary part of their gradients would be lost in the message."""
    if any(parameter.is_complex() for parameter in parameters):
        raise ConfigError(
            "the model has complex parameters, whose gradients several processes do not add up; hold them as real "
            "tensors (torch.view_as_real) and use torch.view_as_complex in forward()"
        )


def check_dense(model: torch.nn.Module) -> None:
    """Refuse embeddings with sparse gradients, before the first step finds them."""
    for name, module in model.named_modules():
        embeds = isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag)
        if embeds and module.sparse and module.weight.requires_grad:
            raise ConfigError(
                f"{name or 'the model'} is an {type(module).__name__} with sparse=True, and several processes do not "
                f"add up sparse gradients; use sparse=False"
            )


def _lying_as(parameter: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
    """A view of a vector in the shape of a parameter, whose numbers lie in the order in which the parameter's lie."""
    order = torch.empty_like(parameter, device="meta").stride()
    return vector.as_strided(parameter.shape, order, vector.storage_offset())


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPart:
    """What one process has computed of a step."""

    loss: torch.Tensor | float = 0.0
    """Mean over its samples, times `scale`."""
    micro_batches: int = 0
    samples: int = 0
    count: torch.Tensor | float = 0
    """What its losses sum over (`loss_sum.py`); for means, its samples."""
    batch: int
    """Samples of the whole step."""
    scale: float = 1.0
    """What loss and gradient were multiplied with: 1 for means over its samples."""


class StepAllReduce:
    """The message of a step: gradient, statistics, loss, running statistics of batch norm, and flags, in one
    all-reduce.

    Guarantees: after a call `.grad`, the batch-norm sums, the loss, the number of micro-batches and the measurement are
    those of the whole step, the same in every process, also where a process had nothing to compute. Where the losses
    are sums with counts (`loss_sum.py`), they are divided by the count of the whole step.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        *,
        meter: Meter | None,
        sums: Sequence[torch.Tensor],
        flags: Sequence[str] = (),
        **settings: Any,
    ) -> None:
        """`sums`: batch-norm statistics summed over this process's micro-batches, each weighted with its part of the
        whole step; they are overwritten with the sums over all processes. `flags`: names of numbers that each process
        says and all add up. `settings`: `all_reduce`, `begin`, `sources`, `collect`, `lengths` and `norm` as for
        AllReduce."""
        self._sums = list(sums)
        self._sizes = [tensor.numel() for tensor in self._sums]
        self._flags = tuple(flags)
        numbers = 3 + len(self._flags)
        fields = {"numbers": numbers, "batch_norm": sum(self._sizes)}
        self._message = AllReduce(parameters, meter=meter, fields=fields, host_fields=numbers, **settings)
        self.flags: dict[str, float] = dict.fromkeys(flags, 0.0)
        """Sum over the processes of what each said in the latest step."""

    def renew(self) -> None:
        """Make a new buffer, after a collective that was abandoned and may still write into the old one."""
        self._message.renew()

    def overlap(self) -> None:
        """Send gradients while the backward pass that follows goes on: see AllReduce."""
        self._message.overlap()

    @torch.no_grad()
    def listen(self, **flags: float) -> torch.Tensor:
        """Take part in a step that this process does not know, with nothing but flags; the sum, in host memory.

        A call in which `begin` gives the parts of this sum instead of adding them up applies the step later.
        """
        numbers = [0.0] * 3 + [flags.get(name, 0.0) for name in self._flags]
        self._message.listen(numbers=torch.tensor(numbers, dtype=torch.float64))
        self.flags = dict(zip(self._flags, self._message["numbers"].tolist()[3:], strict=True))
        return self._message.buffer.to("cpu", copy=True)

    @torch.no_grad()
    def message(self, part: StepPart) -> torch.Tensor:
        """What this process would say in a call, for somebody who adds up the messages; valid until the next step."""
        self._put(part, {})
        self._message.fill(samples=part.samples, batch=part.batch, scale=part.scale)
        return self._message.buffer

    def _put(self, part: StepPart, flags: Mapping[str, float]) -> None:
        message = self._message
        loss = part.loss * (part.samples / part.batch / part.scale)
        numbers = [loss, part.micro_batches, part.count, *(flags.get(name, 0.0) for name in self._flags)]
        on_host = [0.0 if isinstance(number, torch.Tensor) else number for number in numbers]
        message["numbers"].copy_(torch.tensor(on_host, dtype=torch.float64))  # one copy to the device
        for place, number in enumerate(numbers):
            if isinstance(number, torch.Tensor):
                message["numbers"][place].copy_(number.reshape(()))
        if self._sums:
            vector = message["batch_norm"]
            torch.cat([tensor.reshape(-1).to(vector.dtype) for tensor in self._sums], out=vector)

    @torch.no_grad()
    def __call__(self, part: StepPart, **flags: float) -> Gradients:
        """Combine a step, of which this process has computed a part."""
        message = self._message
        self._put(part, flags)
        measurement = message(samples=part.samples, batch=part.batch, scale=part.scale)
        if self._sums:
            parts = message["batch_norm"].split(self._sizes)  # type: ignore[no-untyped-call]
            foreach_copy_(self._sums, [p.view_as(own) for p, own in zip(parts, self._sums, strict=True)])
        mean, passes, counted, *flagged = message.host_values
        self.flags = dict(zip(self._flags, flagged, strict=True))
        gradients = Gradients(loss=mean, micro_batches=round(passes), measurement=measurement, norm=message.norm)
        return normalise(gradients, message.parameters, count=counted, batch=part.batch)
