"""One fit: the training loop makes the steps, skorch's history and callbacks follow them, the record keeps them."""

from __future__ import annotations

import inspect
import logging
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import skorch
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from skorch.callbacks import Callback
from skorch.utils import TeeGenerator

from ebbflow.core.spec import nearest
from ebbflow.engines.base import Engine, EngineMaker, EngineParts
from ebbflow.engines.loss_sum import LossSum
from ebbflow.engines.replica_step import Fetch
from ebbflow.errors import ConfigError, DataError, Diverged, EbbflowError, OutputError
from ebbflow.estimators.batch_size import make_batches
from ebbflow.estimators.dask_arrays import Blocks
from ebbflow.estimators.inputs import DatasetRows
from ebbflow.estimators.modules import ModelLoss
from ebbflow.plan.policies import Policy
from ebbflow.record import NoRecord, RecordWriter, StepRow
from ebbflow.rules.rule import Rule
from ebbflow.run.assemble import assemble, engine_maker, make_optimizer
from ebbflow.run.config import RunConfig
from ebbflow.run.flow import Flow
from ebbflow.run.header import make_header
from ebbflow.run.loop import Callbacks, TrainingLoop
from ebbflow.workloads import Task

__all__ = ["ENGINE_NAMES", "Fit", "ProgressBar", "active_client", "runs_on_cluster"]

_LOG = logging.getLogger(__name__)
_METRICS = {"train_loss": "train_loss", "valid_loss": "loss", "valid_acc": "accuracy"}
"""Names in skorch's history -> names in the record."""

ENGINE_NAMES = ("auto", "emulated", "loop", "fused", "dask")


class Fit:
    """Trains a net on one data set for some epochs."""

    def __init__(self, net: Any, train: Any, valid: Any, *, epochs: int) -> None:
        self.net = net
        self.train = train
        self.valid = valid
        self.epochs = epochs
        self.batches = make_batches(
            net.batch_size,
            net.get_params_for("batch_size"),
            base_batch=net.base_batch,
            local_batch=net.local_batch,
            max_workers=net.max_workers,
            samples=len(train),
        )
        self.rule: str | Rule = net._rule(self.batches, ends=epochs == net.max_epochs)
        self.config: RunConfig = net._run_config(self.batches, self.rule)
        self._engine_settings = net.get_params_for("engine")
        self.on_cluster = runs_on_cluster(net.engine, train, self._engine_settings)
        if self.on_cluster:
            self.config.check_engine("dask")
        self._outputs = _KeptOutputs(net)

    def run(self) -> None:
        """All epochs; what was learned is kept, however it ends."""
        net = self.net
        net.total_samples_ = self.epochs * len(self.train)
        with ExitStack() as stack:
            record = stack.enter_context(open_record(net.record))
            net.record_ = getattr(record, "path", None)
            flow = self._assemble(stack, record)
            stack.push(lambda kind, error, trace: self._keep_state(flow, error))
            self.loop = TrainingLoop(
                flow, record, evaluate=self._finish_epoch, callbacks=Callbacks(on_step=self._after_step)
            )
            record.write(self._header())
            try:
                for _ in range(self.epochs):
                    self._epoch(flow)
                self.loop.end("finished")
            except Diverged as error:
                self.loop.end("diverged", str(error))
                raise

    def _assemble(self, stack: ExitStack, record: RecordWriter) -> Flow:
        net, config = self.net, self.config
        loss = ModelLoss(net.criterion_) if self.on_cluster else self._outputs
        task = Task(model=net.module_, train=DatasetRows(self.train, net.device), loss=loss)
        optimizer = make_optimizer(config, task, net.optimizer_, rule=self.rule, schedule=net.schedule)
        flow: Flow | None = None

        def on_event(what: str, text: str) -> None:
            _LOG.info("%s: %s", what, text)
            if hasattr(self, "loop"):
                self.loop.event(what, text)

        maker = self._dask_maker(stack) if self.on_cluster else _emulated_maker(net.engine)
        plan = None if self.on_cluster else self.batches.plan
        flow = assemble(
            config, task, maker, optimizer=optimizer, plan=plan, policy=self.batches.policy, on_event=on_event
        )
        stack.callback(flow.engine.close)
        flow.on_gradients = self._after_gradients
        if net.flow_state_:
            flow.load_state_dict(net.flow_state_, strict=False)
        return flow

    def _keep_state(self, flow: Flow, error: BaseException | None) -> None:
        self.net.module_.zero_grad(set_to_none=True)
        try:
            self.net.flow_state_ = flow.state_dict(weights=False)
        except EbbflowError as problem:
            if error is None:
                raise
            error.add_note(f"what was learned since the last epoch is lost: {problem}")

    # Steps and epochs ---------------------------------------------------------------------------------------------

    def _epoch(self, flow: Flow) -> None:
        net = self.net
        net.notify("on_epoch_begin", dataset_train=self.train, dataset_valid=self.valid)
        self._rows: list[StepRow] = []
        epoch = flow.ledger.epoch
        while flow.ledger.epoch == epoch:
            net.notify("on_batch_begin", batch=None, training=True)
            self.loop.after(self.loop.next_step())

    def _after_gradients(self) -> None:
        parameters = TeeGenerator(self.net.get_all_learnable_params())
        self.net.notify("on_grad_computed", named_parameters=parameters, batch=None, training=True)

    def _after_step(self, row: StepRow) -> None:
        net = self.net
        self._rows.append(row)
        values = {"train_loss": row.loss, "train_batch_size": row.batch, "train_lr": row.lr, "workers": row.workers}
        for name, value in values.items():
            net.history.record_batch(name, value)
        inputs, targets, outputs = self._outputs.take(row.batch) if not self.on_cluster else (None, None, None)
        net.notify("on_batch_end", batch=(inputs, targets), training=True, loss=row.loss, y_pred=outputs)

    def _finish_epoch(self) -> Mapping[str, float]:
        """Called by the loop after the last step of an epoch: validation and skorch's callbacks; the scores."""
        net, flow = self.net, self.loop.flow
        net.n_epochs_, net.n_updates_ = flow.ledger.epoch, flow.step
        values = {
            "train_batch_count": len(self._rows),
            "batch": max(row.batch for row in self._rows),
            "workers": max(row.workers for row in self._rows),
            "updates": flow.step,
        }
        for name, value in values.items():
            net.history.record(name, value)
        if self.valid is not None:
            iterator = net.get_iterator(self.valid)
            net.run_single_epoch(iterator, training=False, prefix="valid", step_fn=net.validation_step)
        net.notify("on_epoch_end", dataset_train=self.train, dataset_valid=self.valid)
        done = net.history[-1]
        return {short: float(done[name]) for name, short in _METRICS.items() if name in done}

    # Engines ------------------------------------------------------------------------------------------------------

    def _dask_maker(self, stack: ExitStack) -> EngineMaker:
        """The engine on a cluster; `engine__` parameters of the estimator are its settings."""
        from ebbflow.engines.dask import DaskEngine, connect  # reports what to install where distributed is missing

        net = self.net
        if net._has_own_loss:
            raise ConfigError(
                f"{type(net).__name__} has a get_loss of its own, which cannot be sent to the workers; write a "
                f"criterion (a module that takes output and target), or use engine='emulated'"
            )
        settings = dict(self._engine_settings)
        address = settings.pop("client", None)
        client = active_client() if address is None else connect(address)
        if client is None:
            raise ConfigError(
                "engine='dask', but there is no Client; start one (distributed.Client()), or give the address of a "
                "scheduler: engine__client='tcp://host:8786'"
            )
        if address is not None and client is not address:
            stack.callback(client.close)
        fetch: Fetch
        if isinstance(self.train, Blocks):
            from ebbflow.estimators.dask_rows import hold

            fetch, held = hold(self.train, client)
            stack.callback(held.clear)  # blocks stay on the workers as long as somebody holds them
        else:
            fetch = DatasetRows(self.train, "cpu").fetch

        loss = ModelLoss(net.criterion_)

        def make(parts: EngineParts) -> Engine:
            options = {
                "samples": parts.samples,
                "seed": parts.seed,
                "optimizer": parts.optimizer,
                "needs": parts.needs,
                "parameters": parts.parameters,
                "micro_batch": parts.config.micro_batch,
                "precision": parts.config.precision,
                "device": str(net.device),
                "max_workers": net.max_workers,
                "on_event": parts.on_event,
                **settings,
            }
            try:
                return DaskEngine(parts.model, fetch, loss, self._fleet_policy(settings), client=client, **options)
            except TypeError as error:
                raise ConfigError(f"the Dask engine cannot be made with these engine__ settings: {error}") from error

        return make

    def _fleet_policy(self, settings: Mapping[str, Any]) -> Policy:
        """How the workers that are there share a step.

        Where the cluster is scaled, or a limit per worker was given, a step has at most that many samples per worker,
        and the learning rate is reduced for what a growing policy requests beyond; else all workers share the requested
        batch."""
        growing = self.batches.growing
        if growing is None:
            return self.batches.policy
        limited = settings.get("scale") or self.net.local_batch is not None
        return replace(growing, local_batch=self.batches.local_batch if limited else None)

    # The record ---------------------------------------------------------------------------------------------------

    def _header(self) -> Any:
        net, config, validated = self.net, self.config, self.valid is not None
        accuracy = validated and hasattr(net, "classes_")
        described = {
            "workload": f"{type(net).__name__}({type(net.module_).__name__})",
            "trace": f"batch {self.batches.text}",
            "engine": "dask" if self.on_cluster else "emulated",
            "rule": config.rule,
            "seed": net.seed_,
            "epochs": self.epochs,
            "lr": net.lr,
            "ref_batch": self.batches.base_batch,
            "local_batch": self.batches.local_batch,
            "optimizer": type(net.optimizer_).__name__,
            "schedule": config.schedule,
            "estimator": _parameters_in_words(net.get_params(deep=False)),
            "metric": "accuracy" if accuracy else "loss" if validated else "train_loss",
            "higher_is_better": accuracy,
        }
        versions = {"skorch": skorch.__version__}
        return make_header(described, device=str(net.device), plan=self.batches.plan, versions=versions)


_NOT_TOLD = ("batch_size", "rule", "random_state", "record", "verbose", "engine__client")
"""Parameters that a record has elsewhere, or that have nothing to do with what is learned."""


def _parameters_in_words(parameters: Mapping[str, Any]) -> dict[str, str]:
    """The parameters by which a report tells the candidates of a search apart."""
    return {
        name: _in_words(value)
        for name, value in sorted(parameters.items())
        if name not in _NOT_TOLD and not name.startswith("batch_size__")
    }


def _in_words(value: Any) -> str:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, str):
        return value
    text = repr(value)
    if isinstance(value, type) or inspect.isroutine(value):
        return str(getattr(value, "__name__", text))
    return type(value).__name__ if len(text) > 60 or " at 0x" in text else text  # a layer's has many lines


def open_record(folder: str | Path | None) -> RecordWriter:
    """The record of a fit, in a folder of its own: FOLDER/arms/fit-XXXXXXXX/record.jsonl; without a folder no record.

    So the fits of a grid search, also in several processes, do not meet, and `ebbflow report FOLDER` compares them: by
    the parameters in which they differ.
    """
    if folder is None:
        return NoRecord()
    try:
        arms = Path(folder) / "arms"
        arms.mkdir(parents=True, exist_ok=True)
        own = Path(tempfile.mkdtemp(prefix="fit-", dir=arms))
    except OSError as error:
        raise OutputError(f"record={str(folder)!r} cannot be written: {error.strerror}; name a folder") from error
    own.chmod(0o755)  # a temporary folder is for its owner alone, a record is not
    return RecordWriter(own / "record.jsonl")


class _KeptOutputs:
    """The loss of a net, which keeps what the model returned in the current step, for callbacks that score it."""

    def __init__(self, net: Any) -> None:
        self.net = net
        self._kept: list[tuple[Any, torch.Tensor, torch.Tensor]] = []

    def __call__(self, model: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor | LossSum:
        """The loss of a micro-batch."""
        output = model(inputs)
        first = output[0] if isinstance(output, tuple) else output
        self._kept.append((inputs, targets, first.detach()))
        if not self.net._has_own_loss:
            return ModelLoss(self.net.criterion_).in_step(output, targets)
        loss: torch.Tensor | LossSum = self.net.get_loss(output, targets, X=inputs, training=True)
        return loss

    def take(self, batch: int) -> tuple[Any, torch.Tensor, torch.Tensor]:
        """Inputs, targets and outputs of the last `batch` samples; what an earlier attempt left is dropped."""
        kept: list[tuple[Any, torch.Tensor, torch.Tensor]] = []
        while batch > 0:
            kept.insert(0, self._kept.pop())
            batch -= len(kept[0][1])
        self._kept.clear()
        if len(kept) == 1:
            return kept[0]
        inputs, targets, outputs = (torch.cat(parts) for parts in zip(*kept, strict=True))
        return inputs, targets, outputs


def _emulated_maker(name: str) -> EngineMaker:
    return engine_maker("auto" if name == "emulated" else name)


# Which engine -----------------------------------------------------------------------------------------------------


def active_client() -> Any:
    """The Client that this process has made its default, or None; also None inside a task of Dask.

    A task, such as a candidate of a search, must not use other workers of the cluster that it runs on.
    """
    distributed = sys.modules.get("distributed")
    if distributed is None:  # whoever has a Client has imported it
        return None
    try:
        distributed.get_worker()
    except ValueError:
        pass
    else:
        return None
    try:
        return distributed.default_client()
    except ValueError:
        return None


def runs_on_cluster(engine: str, data: Any, settings: Mapping[str, Any]) -> bool:
    """Whether a fit is to run on a Dask cluster; `settings` are the `engine__` parameters."""
    if engine not in ENGINE_NAMES:
        raise ConfigError(f"engine is {engine!r}; {nearest(str(engine), list(ENGINE_NAMES))}")
    found = engine == "dask" or (engine == "auto" and active_client() is not None)
    if isinstance(data, Blocks) and not found:
        raise DataError(
            f"X is a Dask array of {data.text}, which would have to be gathered in this process: start a cluster "
            f"(distributed.Client()) and fit on it with engine='dask', or, if it fits, give X.compute() and y.compute()"
        )
    if settings and not found:
        raise ConfigError(
            f"engine__{next(iter(settings))} is a setting of the Dask engine, but this fit runs in this process; "
            f"set engine='dask', or leave it out"
        )
    return found


class ProgressBar(Callback):  # type: ignore[misc]  # skorch has no types
    """Samples, batch and loss on standard error; shown if the estimator's `verbose` is 1 or more."""

    def __init__(self) -> None:
        self._bar: Progress | None = None

    def on_train_begin(self, net: Any, **_: Any) -> None:
        """Close what an earlier fit left; the first step knows how many samples there will be."""
        self._close()

    def on_batch_end(self, net: Any, training: bool = False, **_: Any) -> None:
        """Advance by one step."""
        if not net.verbose or not training:
            return
        if self._bar is None:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=Console(stderr=True))
            self._task = self._bar.add_task("fit", total=net.total_samples_)
            self._bar.start()
        batch = net.history[-1, "batches", -1]
        text = f"epoch {len(net.history)}  batch {batch['train_batch_size']}  loss {batch['train_loss']:.4g}"
        self._bar.update(self._task, advance=batch["train_batch_size"], description=text)

    def on_train_end(self, net: Any, **_: Any) -> None:
        """Leave the bar as it stands."""
        self._close()

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_bar": None}  # a bar on a terminal cannot be pickled
