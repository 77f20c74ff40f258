"""`Session`: one's own training loop on any engine.

    with ebbflow.Session(model, optimizer, data, trace="spot.csv", rule="sqrt", base_batch=256, local_batch=32,
                         epochs=10) as session:
        for step in session:                        # until all epochs are done, whoever comes and goes
            for x, y in step:                       # the micro-batches that this process computes
                step.backward(loss_fn(model(x), y))

With `loss=` the session computes the steps itself, and `session.run()` needs no loop.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from ebbflow.core.plugins import load_plugins
from ebbflow.data.ledger import Assignment
from ebbflow.engines.base import EngineMaker, Gradients
from ebbflow.engines.loss_sum import LossSum, check_differentiable, check_scalar, rescaled
from ebbflow.engines.replica_step import LoadedMicroBatch, Loss
from ebbflow.errors import ConfigError, Diverged, EbbflowError
from ebbflow.optim.elastic import ElasticOptimizer, multiply_rates
from ebbflow.optim.rule_optimizer import RuleOptimizer
from ebbflow.record import NoRecord, RecordWriter, Run, StepRow, read_record
from ebbflow.run.assemble import assemble, engine_maker, loader_workers, make_optimizer, with_rule
from ebbflow.run.config import RunConfig, other_arguments, shows_settings
from ebbflow.run.device import cpu_settings, enough_memory
from ebbflow.run.flow import Flow, OpenStep, Stateful, states_of
from ebbflow.run.header import make_header
from ebbflow.run.loop import Callbacks, Evaluate, TrainingLoop
from ebbflow.run.planning import make_plan
from ebbflow.run.torchrun import joined
from ebbflow.run.training import RECORD, WEIGHTS, RunFiles
from ebbflow.torch_api import is_sum_over
from ebbflow.workloads import DatasetSource, Source, Task

__all__ = ["Session", "SessionStep", "own_task", "train_session"]

_LOG = logging.getLogger(__name__)

_ELSEWHERE = {"live": "ebbflow.live.live_session:LiveSession"}
"""Engines whose session does more than compute: it is imported when it is first used."""


class SessionStep:
    """One step of a session, as this process sees it.

    Iterate over it and call `backward` for each micro-batch; or leave it alone, and it is computed with the session's
    loss. The step is complete when the loop asks for the next one: then gradients are added up, the rule sets the rate
    and the optimizer steps. If a worker is lost meanwhile, nothing has happened, and the next step has the same samples
    again.
    """

    def __init__(self, session: Session, opened: OpenStep) -> None:
        self.number = session.step
        """Steps that were committed before this one; the same on all replicas of a fleet, and after a restart."""
        self._session = session
        self._engine = session.flow.engine
        self._opened = opened
        self._reduction = session._reduction
        self._gradients: Gradients | None = None
        self._loss_scale = 1.0
        self._earlier_losses: torch.Tensor | None = None
        self._current: LoadedMicroBatch | None = None
        self._own_loop = False
        self._seen: list[tuple[int, int] | None] = []

    @property
    def assignment(self) -> Assignment:
        """The samples of the whole step: an epoch, and positions in the epoch's order."""
        return self._opened.assignment

    @property
    def workers(self) -> int:
        """Workers that share the step."""
        return self._opened.size.workers

    @property
    def epoch(self) -> int:
        """The epoch of the samples, from 0."""
        return self._opened.assignment.epoch

    def __iter__(self) -> Iterator[Any]:
        """Each micro-batch as a DataLoader would yield it; call `backward` on its loss before the next one."""
        self._own_loop = True
        self._engine.open(self._opened.assignment, self._opened.size)
        before, seen = self._rates(), self._rates_seen()
        for number, micro_batch in enumerate(self._engine.micro_batches()):
            if self._rates_seen() != seen:
                raise ConfigError(
                    f"the learning rate was changed{_in_words(before, self._rates())} in the middle of a step, so that "
                    f"it would follow the micro-batches; step schedulers once per step, before `for x, y in step`, or "
                    f"give schedule= to the session instead"
                )
            self._current = micro_batch
            self._seen = self._gradients_seen()
            pair = micro_batch.targets is not None
            yield (micro_batch.inputs, micro_batch.targets) if pair else micro_batch.inputs
            if not micro_batch.last or (number and self._engine.single_process):
                self._check_gradients()
        self._current = None

    def _gradients_seen(self) -> list[tuple[int, int] | None]:
        """What tells whether the gradients of two tensors are still those that a backward pass has left."""
        gradients = [parameter.grad for parameter in self._session._watched]
        return [None if gradient is None else (id(gradient), gradient._version) for gradient in gradients]

    def _check_gradients(self) -> None:
        """Refuse gradients that the loop has changed since the latest backward pass."""
        if self._gradients_seen() != self._seen:
            raise ConfigError(
                "the gradients were changed between the micro-batches of a step, as clip_grad_norm_ and zero_grad do; "
                "they are the sum so far, which becomes the mean of the step. Leave zero_grad() out and give clip= to "
                "the session instead, or change the mean gradient in a hook of optimizer.register_step_pre_hook"
            )

    def _rates(self) -> list[Any]:
        return [group["lr"] for group in self._session.flow.optimizer.param_groups]

    def _rates_seen(self) -> list[Any]:
        """What tells whether the rates are the same, without waiting for a device that has them."""
        return [(id(rate), rate._version) if isinstance(rate, torch.Tensor) else rate for rate in self._rates()]

    def backward(
        self,
        loss: torch.Tensor,
        *,
        count: torch.Tensor | float | None = None,
        last: bool = True,
        loss_scale: float = 1.0,
    ) -> None:
        """Instead of `loss.backward()`: the mean loss over the micro-batch, weighted as the step's mean needs it.

        With `count`, `loss` is a sum over that many tokens, boxes or pixels, and the step divides by the count of all
        its micro-batches. A micro-batch with several losses (a GAN) calls it for each, with `last=False` for all but
        the last one, whose count is the one that counts. With a `loss_scale`, the same for all micro-batches, the
        gradients are scaled by it after `combine`, as a GradScaler expects them; what is recorded and measured is not.
        """
        if self._current is None:
            raise ConfigError("backward() was called outside of `for x, y in step`; call it once for each micro-batch")
        check_scalar(loss)
        if self._earlier_losses is None:
            self._check_gradients()
        samples, self._loss_scale = self._current.samples, loss_scale
        loss = (self._mean(loss, samples) if count is None else loss / samples) * loss_scale
        if not last:
            check_differentiable(loss)
            (loss * self._current.weight).backward()  # type: ignore[no-untyped-call]
            earlier = self._earlier_losses
            self._earlier_losses = loss.detach() if earlier is None else earlier + loss.detach()
            return
        # The earlier losses are constants here: they count in the recorded loss, and their gradients are there already.
        mean = loss if self._earlier_losses is None else loss + self._earlier_losses
        self._engine.backward(mean if count is None else LossSum(mean * samples, count), self._current)
        self._current = self._earlier_losses = None
        self._seen = self._gradients_seen()

    def _mean(self, loss: torch.Tensor, samples: int) -> torch.Tensor:
        """The mean loss over the samples."""
        if self._reduction == "sum":
            return loss / samples
        if self._reduction is None and is_sum_over(loss, samples):
            raise ConfigError(
                f"the loss is a sum over the {samples} samples of the micro-batch, and the step needs their mean; use "
                f"reduction='mean' in the loss, or give reduction='sum' to the session (reduction='mean' if it is a "
                f"mean after all)"
            )
        return loss

    def combine(self) -> bool:
        """Add up the gradients of all processes: the mean over the step is then in `.grad`, and `apply` follows.

        False: a worker was lost, nothing has happened, and the next step has the same samples again. The loop over a
        session calls both; loops that have steps from `Session.next_step` do it themselves.
        """
        engine, opened = self._engine, self._opened
        try:
            gradients = engine.combine() if self._own_loop else engine.gradients(opened.assignment, opened.size)
        except BaseException:
            self._session.flow.abandon()
            raise
        self._gradients = rescaled(gradients, 1 / self._loss_scale) if self._loss_scale != 1 else gradients
        if self._session.flow.commit(opened):
            return True
        self._session._after(None)
        return False

    def apply(self) -> StepRow:
        """After `combine`: let the rule set the rate and the optimizer step, with the gradient that is in `.grad`."""
        assert self._gradients is not None, "apply follows combine"
        row = self._session.flow.apply(self._opened, self._gradients)
        self._session._after(row)
        return row

    @property
    def loss(self) -> float:
        """After `combine`: the mean over the step."""
        assert self._gradients is not None, "the loss is known after combine"
        return self._gradients.loss


def own_task(model: torch.nn.Module, data: Any, loss: Loss | None, *, workers: int = 0) -> Task:
    """The task of a user's own model and data: a map-style data set, a DataLoader of one, or a source.

    Of a DataLoader, the data set, `collate_fn`, `num_workers`, `worker_init_fn` and `batch_size` are used; the session
    orders the samples, so that a sampler of its own is refused.
    """
    if isinstance(model, DistributedDataParallel):
        raise ConfigError(
            "the model is wrapped in DistributedDataParallel, but the engine adds up the gradients: give model.module"
        )
    if isinstance(data, tuple) and data and all(hasattr(part, "shape") for part in data):
        raise ConfigError(
            f"the data is a tuple of {len(data)} arrays, which would be taken for a data set of {len(data)} samples; "
            f"make one of their rows: torch.utils.data.TensorDataset(x, y)"
        )
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    if isinstance(data, DataLoader):
        source: Source = DatasetSource.from_loader(data, device, pairs=loss is not None)
    elif hasattr(data, "batch") and (hasattr(data, "to") or not hasattr(data, "__getitem__")):
        source = data
    else:
        source = DatasetSource(data, device, pairs=loss is not None)
    if isinstance(source, DatasetSource):
        source = source.with_loader_workers(workers)
    return Task(model=model, train=source, loss=loss)


def _has_key(state: Any, key: str) -> bool:
    """Whether a key is anywhere in a state."""
    if isinstance(state, Mapping):
        return key in state or any(_has_key(value, key) for value in state.values())
    return isinstance(state, list | tuple) and any(_has_key(value, key) for value in state)


def _in_words(before: Sequence[Any], after: Sequence[Any]) -> str:
    """Which rate was changed, if it is a number; a tensor may have been changed in place."""
    for old, new in zip(before, after, strict=True):
        if old is not new and old != new:
            return f" from {float(old):g} to {float(new):g}"
    return ""


def _check_kinds(model: Any, optimizer: Any, evaluate: Any, extras: Mapping[str, Any]) -> None:
    """Refuse arguments of another kind, such as in another order, before anything is asked of them."""
    for name, value, kind, expected in (
        ("model", model, torch.nn.Module, "torch.nn.Module"),
        ("optimizer", optimizer, torch.optim.Optimizer, "torch.optim.Optimizer"),
    ):
        if not isinstance(value, kind):
            raise ConfigError(
                f"the {name} is a {type(value).__name__}; expected a {expected}: Session(model, optimizer, data, ...)"
            )
    if evaluate is not None and not callable(evaluate):
        raise ConfigError(
            f"evaluate is a {type(evaluate).__name__}; expected a function that returns the scores by name"
        )
    for name, extra in extras.items():
        if missing := [method for method in ("state_dict", "load_state_dict") if not hasattr(extra, method)]:
            raise ConfigError(f"{name!r} among the extras is a {type(extra).__name__}, which has no {missing[0]}()")


def _check_parameters(model: torch.nn.Module, optimizer: RuleOptimizer) -> None:
    """Refuse an optimizer that trains tensors of something else than the model."""
    own = {id(parameter) for parameter in model.parameters()}
    given = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if foreign := sum(id(parameter) not in own for parameter in given):
        raise ConfigError(
            f"{foreign} of the {len(given)} tensors of the optimizer do not belong to the model; make the optimizer "
            f"with model.parameters() after the model is built and moved, and put several models into one nn.ModuleList"
        )
    if not any(parameter.requires_grad for parameter in given):
        raise ConfigError(
            f"the {len(given)} tensors of the optimizer are all frozen (requires_grad is False), so that there is "
            f"nothing to train; expected one that requires a gradient"
        )


@shows_settings("session")
class Session:
    """A training in your own loop: every sample once per epoch, and the learning rate follows the batch by a rule.

    Use it in a `with`, and iterate over it to get the steps (`SessionStep`). Settings are those of `RunConfig` under
    the names that `help(ebbflow.Session)` shows: rule, trace, base_batch, local_batch, epochs, schedule, policy, seed,
    ... With `out`, the session writes a record and checkpoints into that folder; the same script continues after a
    kill, and `ebbflow report` reads the folder.

    `Session(..., engine="live")` is `ebbflow.live.join(...)`: a replica of a fleet of real processes.
    """

    _planned: ClassVar[bool] = True
    """Whether the steps follow a plan that is known beforehand."""
    _whose_state: ClassVar[str] = "what is saved of the run: after an interruption it"

    def __new__(cls, *arguments: Any, engine: str | EngineMaker = "auto", **others: Any) -> Session:
        """The kind of session that the engine needs."""
        if cls is Session and isinstance(engine, str) and engine in _ELSEWHERE:
            module, _, name = _ELSEWHERE[engine].partition(":")
            cls = getattr(importlib.import_module(module), name)
        return super().__new__(cls)

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | ElasticOptimizer,
        data: Any,
        *,
        engine: str | EngineMaker = "auto",
        loss: Loss | None = None,
        reduction: Literal["mean", "sum"] | None = None,
        max_steps: int | None = None,
        evaluate: Evaluate | None = None,
        extras: Mapping[str, Stateful] | None = None,
        out: Path | str | None = None,
        callbacks: Callbacks | None = None,
        checkpoint_every_s: float = 60.0,
        config: RunConfig | None = None,
        **settings: Any,
    ) -> None:
        """`optimizer`: any optimizer of torch, whose rates were tuned at `base_batch` samples; or an ElasticOptimizer.

        `data`: a map-style data set, whose samples are collated as a DataLoader does it; a DataLoader, whose
        `collate_fn`, `num_workers`, `worker_init_fn` and `batch_size` are used; or a source with
        `batch(indices, train=True)`. `engine`:
        auto, fused or loop (virtual workers in this process), live (a replica of a fleet), the name of one that you
        registered, or a function EngineParts -> Engine, such as one that makes a DaskEngine. `loss(model, x, y)`: the
        mean over the samples, for `run()` and for engines that compute elsewhere; samples are then (input, target)
        pairs. `reduction`: whether the loss that `step.backward` gets is a mean or a sum over the samples; by default a
        mean, and a loss that ends with a sum is refused. `max_steps`: the run ends after this many steps, or after
        `epochs` if that is given and comes first. `evaluate()`: called after every epoch; the scores that it returns go
        into the record, and after it every module is in the mode (`train` or `eval`) in which it was before. `extras`:
        whatever else belongs to the state, by name, with `state_dict` and `load_state_dict`: schedulers, a second
        optimizer. They are saved and restored with it, also where the rule goes back to a snapshot (`auto`); what is
        not among them is not. `out`: the folder of the run. `config`: all settings at once instead of `settings`."""
        _check_kinds(model, optimizer, evaluate, extras or {})
        self.model = model
        if isinstance(data, DataLoader) and config is None and data.batch_size is not None:
            settings = {"local_batch": data.batch_size, **settings}
        self.config = config or RunConfig.for_front_end(
            "session", settings, beside=self._own_arguments(), workload=type(model).__name__
        )
        load_plugins(self.config.plugins)
        if max_steps is not None and max_steps < 1:
            raise ConfigError(f"max_steps is {max_steps}; expected 1 or more")
        if self.config.epochs is None and self._planned:
            also = "; the steps of virtual workers are planned for the whole run, which max_steps may end sooner"
            raise ConfigError(f"epochs is missing: how many passes over the data?{also if max_steps else ''}")
        if self.config.epochs is None and max_steps is None:
            raise ConfigError("epochs is missing: how many passes over the data? Or give max_steps")
        self._max_steps = max_steps or 0
        self._extras = dict(extras or {})
        states_of(self._extras)  # now, and not at the first checkpoint
        self.task = own_task(model, data, loss, workers=loader_workers(self.config))
        self._maker = engine_maker(engine) if isinstance(engine, str) else engine
        self.config = with_rule(self.config, self.task, optimizer, engine=self._maker, planned=self._planned)
        self._optimizer = make_optimizer(self.config, self.task, optimizer)
        _check_parameters(model, self._optimizer)
        trained = [p for group in self._optimizer.param_groups for p in group["params"] if p.requires_grad]
        self._watched = [*{id(p): p for p in (trained[0], trained[-1])}.values()]
        """The parameters in whose gradients it is seen that a loop changed them."""
        self._reduction = reduction
        self._evaluate = evaluate
        self._callbacks = callbacks or Callbacks()
        self._folder = Path(out) if out is not None else None
        if self.config.tracker is not None and self._folder is None and type(self) is Session:
            raise ConfigError(f"tracker is {self.config.tracker!r}, but the session has no folder; give out=, too")
        self._checkpoint_every_s = checkpoint_every_s
        self._stack = ExitStack()
        self._loop: TrainingLoop | None = None
        self._rates: list[float] = []

    @classmethod
    def _own_arguments(cls) -> list[str]:
        """The arguments that are no settings."""
        return other_arguments(cls, "session")

    # Beginning and ending -----------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._loop = self._open(stack)
            self._watch_optimizer(stack)
            self._loop.begin()
            self._stack = stack.pop_all()
        return self

    def _watch_optimizer(self, stack: ExitStack) -> None:
        """Refuse a call of the optimizer's `step` that is not the session's own."""
        self._applying = False

        def on_gradients() -> None:
            self._check_rates()
            self._applying = True

        def before_step(*_: Any) -> None:
            if not self._applying:
                raise ConfigError(
                    "optimizer.step() was called, but the session applies each step itself, once for all its "
                    "micro-batches; remove optimizer.step() from the loop"
                )
            self._applying = False

        self.flow.on_gradients = on_gradients
        stack.callback(self._optimizer.inner.register_step_pre_hook(before_step).remove)

    @property
    def _keeps_state(self) -> bool:
        """Whether the run may go on, here or elsewhere, with what was saved of it."""
        return self._folder is not None

    def _current_rates(self) -> list[float]:
        """The rates, if a scheduler of torch may change them and that matters."""
        optimizer = self._optimizer
        stepped = any(getattr(one.step, "_wrapped_by_lr_sched", False) for one in (optimizer, optimizer.inner))
        return [float(group["lr"]) for group in optimizer.inner.param_groups] if stepped and self._keeps_state else []

    def _check_rates(self) -> None:
        """Refuse rates that a scheduler of torch changed and whose state would not go on with the run."""
        if not self._rates or self._rates == self._current_rates():
            return
        if self._optimizer.schedule is not None:
            raise ConfigError(
                f"a scheduler changed the learning rate, but schedule={str(self._optimizer.schedule)!r} sets it in "
                f"every step; use one of the two"
            )
        if not self._keeps_scheduler:
            raise ConfigError(
                f"a scheduler changed the learning rate, but its state is not part of {self._whose_state} would have "
                f"another rate. Give it with extras={{'scheduler': scheduler}}, or use schedule= instead"
            )

    @cached_property
    def _keeps_scheduler(self) -> bool:
        """Whether any of the extras is a scheduler, or has the state of one in its own."""
        return any(
            callable(getattr(extra, "step", None)) or _has_key(extra.state_dict(), "last_epoch")
            for extra in self._extras.values()
        )

    def _open(self, stack: ExitStack) -> TrainingLoop:
        config, task = self.config, self.task
        ranks = stack.enter_context(joined(str(next(self.model.parameters()).device)))
        ranks.same_weights(self.model)
        by_gain, guards = self._optimizer.by_gain, self._optimizer.rule.guards
        plan, trace = make_plan(config, len(task.train), by_gain=by_gain, guards=guards)
        loop: TrainingLoop

        def on_event(what: str, text: str) -> None:
            loop.event(what, text)

        flow = assemble(
            config, task, self._maker, optimizer=self._optimizer, plan=plan, ranks=ranks.ranks, on_event=on_event
        )
        flow.max_steps, flow.extras = self._max_steps, self._extras
        stack.callback(task.close)
        stack.callback(flow.engine.close)
        record: RecordWriter = NoRecord()
        save: Callable[[], None] | None = None
        save_final: Callable[[], None] | None = None
        if self._folder is not None:
            files = RunFiles(self._folder, config, ranks, kind="session")
            ranks.shared(files.check_kind)
            stack.enter_context(files.lock())
            ended = ranks.shared(files.finished_run)
            if ended is not None:
                what = "the finished run" if ended.status == "finished" else f"a {ended.status} run"
                raise ConfigError(f"{self._folder} holds {what} of this session; give another out=")
            described = {**config.recorded(), "trace": config.trace, "metric": "loss", "higher_is_better": False}
            device = str(next(self.model.parameters()).device)
            record = stack.enter_context(
                files.open(flow, lambda: make_header(described, device=device, plan=plan, trace=trace))
            )
            save, save_final = partial(files.save, flow), partial(files.save_weights, flow)

            def leave(kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
                if loop.ending is not None:
                    files.remove_checkpoint()
                    return
                if flow.incomplete:  # half a step has happened; the last checkpoint is of a whole one
                    return
                try:
                    files.save(flow)
                except EbbflowError as problem:
                    if error is None:
                        raise
                    error.add_note(f"the state of step {flow.step} could not be saved: {problem}")

            stack.push(leave)
        loop = TrainingLoop(
            flow,
            record,
            evaluate=self._evaluate,
            validate_every=config.validate_every,
            callbacks=self._callbacks,
            save=save,
            save_final=save_final,
            checkpoint_every_s=self._checkpoint_every_s,
        )
        return loop

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        try:
            if self._loop is not None:
                self._loop.flow.abandon()  # the step that the loop has left open
            if self._loop is not None and isinstance(error, Diverged):
                self._loop.end("diverged", str(error))
            elif self._loop is not None and error is None:
                self._continues()  # a loop may ask whether the run is finished, and for no further step
        finally:
            self._stack.__exit__(kind, error, trace)

    # Training -----------------------------------------------------------------------------------------------------

    @property
    def loop(self) -> TrainingLoop:
        """The loop of the session, inside of its `with`."""
        if self._loop is None:
            raise ConfigError(
                "the session is not open: use it in a `with`, as in `with ebbflow.Session(...) as session:`"
            )
        return self._loop

    @property
    def flow(self) -> Flow:
        """Engine, optimizer and position of the session."""
        return self.loop.flow

    def __iter__(self) -> Iterator[SessionStep]:
        """Steps to compute, until the run has ended (see `finished`)."""
        while (step := self.next_step()) is not None:
            with step._opened.restore:
                try:
                    yield step
                except GeneratorExit:  # the loop was left with `break`, return or an error
                    self.flow.abandon()
                    raise
                if step.combine():
                    step.apply()

    def next_step(self) -> SessionStep | None:
        """The next step, for loops that call its `combine` and `apply` themselves; None when there is none left."""
        while self._continues():
            opened = self._open_step()
            if opened is not None:
                return SessionStep(self, opened)
        return None

    def _continues(self) -> bool:
        """Whether there is another step; ends the run if there is none."""
        ended = self.loop.ending
        if ended is not None:
            return False
        continues = self.loop.continues()
        ending = self.loop.ending
        if ending is not None and ending.status == "failed":
            _LOG.warning("the run has failed: %s", ending.text)
        return continues

    def _open_step(self) -> OpenStep | None:
        """The next step up to its backward passes; None if it turns out that there may be none."""
        with self.loop.plan_errors_explained():
            opened = self.flow.open()
        self._rates = self._current_rates()
        return opened

    def _after(self, row: StepRow | None) -> None:
        """Everything that follows a step; None: it was lost."""
        self._applying = False
        self._rates = self._current_rates()
        if row is None:
            self.loop.lost_step()
        else:
            self.loop.after(row)
        self._check_rates()

    def run(self) -> None:
        """Train to the end with the loss that was given."""
        for _ in self:
            pass

    @property
    def finished(self) -> bool:
        """Whether the run has ended: after its epochs, its `max_steps` or, where the rule counts it, all its gain."""
        return self.flow.finished or self.loop.ending is not None

    @property
    def step(self) -> int:
        """Committed steps."""
        return self.flow.step

    @property
    def epoch(self) -> int:
        """Completed epochs."""
        return self.flow.ledger.epoch

    @property
    def record(self) -> Run:
        """The record so far, if the session has a folder; after the `with`, the whole record."""
        if self._folder is None:
            raise ConfigError("the session has no folder, so no record; give out=")
        self.loop.record.flush()
        return read_record(self._folder / RECORD)


def train_session(
    make: Callable[[], Mapping[str, Any]],
    config: RunConfig,
    folder: Path | str,
    *,
    command: str = "",  # accepted, as `train` does, which writes it into the record
    callbacks: Callbacks | None = None,
    checkpoint_every_s: float = 60.0,
    keep_weights: bool = True,
) -> Run:
    """What `train` is for a workload, for a model of your own: a whole session, from settings to its record.

    `make()` returns the arguments of a Session, with `loss`; before, torch's generators are seeded with `config.seed`.
    If `config.lr` is set, the rates of all parameter groups are multiplied by one factor, so that it is the first one.
    The record does not hold the `command`.
    """
    callbacks, folder = callbacks or Callbacks(), Path(folder)
    with cpu_settings(config.threads), enough_memory(config.device):
        torch.manual_seed(config.seed)
        made = dict(make())
        if config.lr is not None:
            multiply_rates(made["optimizer"], float(config.lr))
        session = Session(**made, config=config, out=folder, callbacks=callbacks, checkpoint_every_s=checkpoint_every_s)
        with suppress(Diverged), session:
            session.run()
    if not keep_weights:
        (folder / WEIGHTS).unlink(missing_ok=True)
    return read_record(folder / RECORD)
