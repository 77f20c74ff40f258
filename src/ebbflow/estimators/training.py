"""One fit: the flow makes the steps, skorch's history and callbacks hear of them, the record keeps them."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

from skorch.utils import TeeGenerator

from ebbflow.errors import ConfigError, Diverged
from ebbflow.estimators.batches import Batches, make_batches
from ebbflow.estimators.cluster import dask_engine, on_cluster
from ebbflow.estimators.fitting import Announced, Watched, emulated_engine, make_flow, saved_state
from ebbflow.estimators.modules import ModelLoss
from ebbflow.estimators.recording import FitRecord
from ebbflow.moments.meters import HookMeter
from ebbflow.optim.elastic import ElasticOptimizer
from ebbflow.record import Event, StepRow
from ebbflow.run.flow import Flow

__all__ = ["Training"]

_LOG = logging.getLogger(__name__)
_METRICS = {"train_loss": "train_loss", "valid_loss": "loss", "valid_acc": "accuracy"}
"""Names in skorch's history -> names in the record."""


class Training:
    """Trains a net on one data set for some epochs; `run` is the whole story."""

    def __init__(self, net: Any, train: Any, valid: Any, *, epochs: int) -> None:
        self.net = net
        self.train = train
        self.valid = valid
        self.epochs = epochs
        self.batches: Batches = make_batches(
            net.batch_size,
            net.get_params_for("batch_size"),
            base_batch=net.base_batch,
            local_batch=net.local_batch,
            max_workers=net.max_workers,
            samples=len(train),
        )
        self.optimizer = ElasticOptimizer(
            net.optimizer_,
            net.rule,
            base_batch=self.batches.base_batch,
            schedule=net.schedule,
            epochs=net.max_epochs,
            epoch_samples=len(train),
        )
        self.record = FitRecord(net.record)
        self.watched: Watched | None = None
        self._close: Callable[[], None] = lambda: None
        try:
            self.flow = self._flow(self._engine())
        except BaseException:
            self._close()
            self.record.close()
            raise

    def _engine(self) -> Announced:
        net = self.net
        settings = net.get_params_for("engine")
        parts = (self.batches, self.optimizer)
        if on_cluster(net.engine, self.train, settings):
            if type(net).get_loss is not type(net)._usual_loss:
                raise ConfigError(
                    f"{type(net).__name__} has a get_loss of its own, which does not travel to the workers; write a "
                    f"criterion (a module that takes output and target), or use engine='emulated'"
                )
            loss = ModelLoss(net.criterion_)
            there = dask_engine(
                net.module_, self.train, loss, *parts, settings=settings, limited=net.local_batch is not None,
                seed=net.seed_, device=str(net.device), max_workers=net.max_workers, on_event=self._tell_event,
            )  # fmt: skip
            self._close = there.close
            return Announced(there.engine, on_gradients=self._tell_gradients, on_request=there.want)
        self.watched = Watched(net)
        here = emulated_engine(net.module_, self.train, self.watched, *parts, seed=net.seed_, device=net.device)
        if isinstance(here.meter, HookMeter):
            self._close = here.meter.close  # its hooks cannot be pickled with the module
        return Announced(here, on_gradients=self._tell_gradients)

    def _flow(self, engine: Announced) -> Flow:
        return make_flow(
            engine,
            self.optimizer,
            self.batches,
            samples=len(self.train),
            epochs=self.net.max_epochs,
            epochs_done=self.net.n_epochs_,
            saved=self.net.flow_state_,
        )

    def run(self) -> None:
        """All epochs; what was learned is kept, however it ends."""
        net = self.net
        net.total_samples_ = self.epochs * len(self.train)
        net.record_ = self.record.path
        self.record.begin(self._described(), self.batches.plan.describe(), str(net.device))
        try:
            for _ in range(self.epochs):
                self._epoch()
            self.record.end(self.flow, "finished")
        except Diverged as error:
            self.record.end(self.flow, "diverged", str(error))
            raise
        finally:
            self._close()
            net.module_.zero_grad(set_to_none=True)
            net.flow_state_ = saved_state(self.flow)
            self.record.close()

    def _epoch(self) -> None:
        net, flow = self.net, self.flow
        datasets = {"dataset_train": self.train, "dataset_valid": self.valid}
        net.notify("on_epoch_begin", **datasets)
        epoch, rows = flow.ledger.epoch, []
        while flow.ledger.epoch == epoch:
            rows.append(self._step())
        flow.engine.sync()  # validation and callbacks see the weights
        net.n_epochs_, net.n_updates_ = flow.ledger.epoch, flow.step
        told = {
            "train_batch_count": len(rows),
            "batch": max(row.batch for row in rows),
            "workers": max(row.workers for row in rows),
            "updates": flow.step,
        }
        for name, value in told.items():
            net.history.record(name, value)
        if self.valid is not None:
            iterator = net.get_iterator(self.valid)
            net.run_single_epoch(iterator, training=False, prefix="valid", step_fn=net.validation_step)
        net.notify("on_epoch_end", **datasets)
        done = net.history[-1]
        self.record.epoch(flow, {short: float(done[name]) for name, short in _METRICS.items() if name in done})

    def _step(self) -> StepRow:
        net, flow = self.net, self.flow
        net.notify("on_batch_begin", batch=None, training=True)
        while (row := flow.run_step()) is None:
            self.record.event(flow, "lost step", "a worker left in its middle")
        self.record.write(row)
        if row.loss is None or not math.isfinite(row.loss):
            raise Diverged(
                f"the training loss is {row.loss} at update {row.step}: use a smaller learning rate than {row.lr:g}, "
                f"or scale the inputs, for example with sklearn.preprocessing.StandardScaler in a Pipeline"
            )
        told = {"train_loss": row.loss, "train_batch_size": row.batch, "train_lr": row.lr, "workers": row.workers}
        for name, value in told.items():
            net.history.record_batch(name, value)
        inputs, targets, outputs = self.watched.take(row.batch) if self.watched is not None else (None, None, None)
        net.notify("on_batch_end", batch=(inputs, targets), training=True, loss=row.loss, y_pred=outputs)
        return row

    def _tell_event(self, what: str, text: str) -> None:
        _LOG.info("%s: %s", what, text)
        self.record.write(Event(step=self.flow.step if hasattr(self, "flow") else 0, what=what, text=text))

    def _tell_gradients(self) -> None:
        parameters = TeeGenerator(self.net.get_all_learnable_params())
        self.net.notify("on_grad_computed", named_parameters=parameters, batch=None, training=True)

    def _described(self) -> dict[str, Any]:
        """The settings of the fit, as the header of its record has them."""
        net, validated = self.net, self.valid is not None
        accuracy = validated and hasattr(net, "classes_")
        return {
            "workload": f"{type(net).__name__}({type(net.module_).__name__})",
            "trace": f"batch {self.batches.text}",
            "rule": str(self.optimizer.rule),
            "seed": net.seed_,
            "epochs": self.epochs,
            "lr": net.lr,
            "ref_batch": self.batches.base_batch,
            "local_batch": self.batches.local_batch,
            "optimizer": type(net.optimizer_).__name__,
            "schedule": None if net.schedule is None else str(net.schedule),
            "metric": "accuracy" if accuracy else "loss" if validated else "train_loss",
            "higher_is_better": accuracy,
        }
