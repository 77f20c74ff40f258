"""The Trainer of transformers on workers that come and go.

    trainer = ElasticTrainer(model=model, args=args, train_dataset=data,
                             elastic={"trace": "spot.csv", "rule": "sqrt", "base_batch": 64})

Everything else of the script stays as it is. `ElasticTrainerMixin` does the same for a Trainer of your own, or of
another library: `class MyTrainer(ElasticTrainerMixin, SFTTrainer)`.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from ebbflow.core.extras import require
from ebbflow.errors import ConfigError
from ebbflow.integrations.session_optimizer import ReferenceSteps, SessionOptimizer, refuse_settings
from ebbflow.run.planning import MAX_EPOCHS
from ebbflow.run.session import Session, SessionStep

if TYPE_CHECKING:
    from transformers import Trainer, TrainerCallback
else:
    require("accelerate", extra="transformers", needed_for="ElasticTrainer")
    _library = require("transformers", extra="transformers", needed_for="ElasticTrainer")
    Trainer, TrainerCallback = _library.Trainer, _library.TrainerCallback

__all__ = ["ElasticTrainer", "ElasticTrainerMixin"]

_INSTEAD = {
    "epochs": "num_train_epochs of TrainingArguments",
    "max_steps": "max_steps of TrainingArguments",
    "schedule": "lr_scheduler_type of TrainingArguments",
    "clip": "max_grad_norm of TrainingArguments",
    "seed": "data_seed or seed of TrainingArguments",
    "micro_batch": "per_device_train_batch_size of TrainingArguments",
    "precision": "bf16 or fp16 of TrainingArguments",
    "evaluate": "eval_strategy of TrainingArguments",
    "out": "output_dir of TrainingArguments",
    "tracker": "report_to of TrainingArguments",
}


class _StepLoader(DataLoader[Any]):
    """What the Trainer sees as its DataLoader: the session reads the samples, so that this one gives out none."""

    def __iter__(self) -> Any:
        return iter(())


class _StepInputs(dict[str, Any]):
    """What the Trainer sees as the inputs of a step; the session has them."""

    def __init__(self, step: SessionStep) -> None:
        self.step = step


class _FollowSession(TrainerCallback):  # type: ignore[misc]
    """Tells the Trainer where the session has got to, before its other callbacks decide what to log and to save."""

    def __init__(self, trainer: ElasticTrainerMixin) -> None:
        self._trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._trainer._follow(state, control)


class ElasticTrainerMixin(Trainer):  # type: ignore[misc]
    """A Trainer whose steps follow a trace, or that is a replica of a live fleet.

    `elastic`: the settings of an `ebbflow.Session`: base_batch (the batch at which `learning_rate` was tuned), rule,
    trace, policy, ...; with `engine="live"` this process joins the fleet of `ebbflow launch`. A worker takes
    `per_device_train_batch_size * gradient_accumulation_steps` samples per step, with that many in a backward pass.

    Guarantees: every sample counts once per epoch, in the order of the session; the gradient of a step is the mean over
    its tokens (labels that are not -100), or over its samples where there are no such labels, however many workers
    share it; clipping (`max_grad_norm`) sees that mean; one step of the fleet is one step of the Trainer, for logging,
    evaluation, saving and callbacks. The Trainer's scheduler sets the base rate and counts reference steps
    (`ReferenceSteps`), and the rule multiplies it once, for the duration of the step. `max_steps` and `warmup_steps`
    count steps at the reference batch. A checkpoint of the Trainer holds the position in the data.

    Several ranks of torchrun share the virtual workers of every step, and compute what one process computes; a
    checkpoint may be continued by any number of them.

    Limits: the Trainer's `training_step` is replaced; override `compute_loss`. DeepSpeed, FSDP and DataParallel are
    refused, and so are a sampling strategy other than "random" and streams (IterableDataset). A live fleet continues
    from its own checkpoints.
    """

    def __init__(self, *arguments: Any, elastic: Mapping[str, Any], **others: Any) -> None:
        super().__init__(*arguments, **others)
        if not isinstance(elastic, Mapping):
            raise ConfigError(f'elastic is {elastic!r}; expected settings, such as {{"trace": ..., "base_batch": 64}}')
        self._elastic = dict(elastic)
        refuse_settings(self._elastic, _INSTEAD)
        self._live = self._elastic.get("engine") == "live"
        self._check_arguments()
        self._accumulated: int = self.args.gradient_accumulation_steps
        self.args: Any = copy.copy(self.args)
        self.args.gradient_accumulation_steps = 1  # the session cuts steps into backward passes
        self.args.average_tokens_across_devices = False  # and adds up tokens
        self.session: Session | None = None
        """The session of the training that is under way, or of the latest one."""
        self._stack = ExitStack()
        self._wrapped: torch.optim.Optimizer | None = None
        self._applying: SessionOptimizer | None = None
        self.callback_handler.callbacks.insert(0, _FollowSession(self))
        # The session adds up the gradients of several ranks, so that DistributedDataParallel must not.
        self.accelerator.prepare_model = partial(self.accelerator.prepare_model, evaluation_mode=True)

    def _check_arguments(self) -> None:
        args = self.args
        if self.is_deepspeed_enabled or self.is_fsdp_enabled or args.n_gpu > 1:
            raise ConfigError(
                "the Trainer uses DeepSpeed, FSDP or several GPUs in one process, and every process of an "
                "ElasticTrainer has the whole model on one device; turn them off, or start one process per GPU"
            )
        strategy = getattr(args, "train_sampling_strategy", "random")
        if strategy != "random":
            raise ConfigError(
                f"train_sampling_strategy is {strategy!r}, but here every sample counts once per epoch, in an order "
                f"that follows from the seed; leave it at 'random'"
            )
        if isinstance(self.train_dataset, IterableDataset):
            raise ConfigError(
                f"train_dataset is a {type(self.train_dataset).__name__}, a stream, but here every sample counts once "
                f"per epoch, in an order that follows from the seed; give a data set with random access"
            )
        if self.train_dataset is not None and not len(self.train_dataset):
            raise ConfigError("train_dataset has no samples; expected one or more")
        if self._live and args.fp16:
            raise ConfigError("fp16 is set, whose loss scale a fleet does not share; use bf16")

    # The Trainer's loop, in the order in which it calls these -----------------------------------------------------

    def _inner_training_loop(self, *arguments: Any, **others: Any) -> Any:
        if self._live and (others.get("resume_from_checkpoint") or self.args.resume_from_checkpoint):
            raise ConfigError(
                "resume_from_checkpoint is given, but a live fleet continues from its own checkpoints; leave it out"
            )
        with ExitStack() as self._stack:
            result = super()._inner_training_loop(*arguments, **others)
            assert self.session is not None
            self.session.next_step()  # writes the end of a run that is finished; a run that was stopped has none
            return result

    def get_train_dataloader(self) -> DataLoader[Any]:
        """The samples and how they are collated; the session reads them."""
        loader = super().get_train_dataloader()
        return _StepLoader(
            loader.dataset,
            batch_size=self._train_batch_size,
            shuffle=True,
            collate_fn=loader.collate_fn,
            num_workers=self.args.dataloader_num_workers,
        )

    def set_initial_training_values(self, args: Any, dataloader: DataLoader[Any]) -> tuple[int, ...]:
        """What the Trainer wants to know about the run; it ends when the session does."""
        self._loader = dataloader
        samples = len(dataloader.dataset)  # type: ignore[arg-type]
        reference = int(self._elastic.get("base_batch") or 0)
        if args.max_steps > 0:
            self._total = args.max_steps * reference
        else:
            self._total = math.ceil(args.num_train_epochs * samples)
            if self._total <= 0:
                raise ConfigError(f"num_train_epochs is {args.num_train_epochs}; expected more than 0, or max_steps")
        self._epochs = max(1, math.ceil(self._total / samples))
        endless = sys.maxsize  # the length of an epoch in steps is known at its end
        steps = max(1, math.ceil(self._total / max(1, reference)))
        return self._epochs * MAX_EPOCHS, endless, samples, self._total, reference, endless, steps

    def create_optimizer(self, *arguments: Any) -> torch.optim.Optimizer:
        """The optimizer of the Trainer, as that of a session, which begins here."""
        if self._wrapped is None:
            self._wrapped = super().create_optimizer(*arguments)
        per_pass = self._train_batch_size
        settings = {"local_batch": per_pass * self._accumulated, **self._elastic}
        if not self._live:
            settings = {"engine": "loop", "loader_workers": self.args.dataloader_num_workers, **settings}
        if self.accelerator.scaler is not None:
            settings["on_nonfinite"] = "skip"
        if self._live:
            settings["extras"] = {**settings.get("extras", {}), "lr_scheduler": _DerivedState()}
        seed = self.args.data_seed if self.args.data_seed is not None else self.args.seed
        self.session = Session(
            self.model, self._wrapped, self._loader, epochs=self._epochs, micro_batch=per_pass, seed=seed, **settings
        )
        self._stack.enter_context(self.session)
        flow = self.session.flow
        flow.total_samples = flow.optimizer.total_samples = self._total
        self.optimizer = self._applying = SessionOptimizer(self._wrapped, scaled=self.accelerator.scaler is not None)
        self._applying.begin(self.session)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """The scheduler of the Trainer, which counts reference steps."""
        scheduler = super().create_scheduler(num_training_steps, optimizer)
        plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
        if self._applying is not None and not plateau and not isinstance(scheduler, ReferenceSteps):
            self.lr_scheduler = scheduler = ReferenceSteps(scheduler, self._applying)
        return scheduler

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[list[Any], None]:
        """The next step of the session, which may have to wait for a worker."""
        assert self.session is not None
        step = self.session.next_step()
        if step is None:
            self.control.should_training_stop = True
            return [], None
        return [_StepInputs(step)], None

    def training_step(self, model: torch.nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """The backward passes of a step, and the sum over all workers; again, if one of them was lost meanwhile."""
        assert self.session is not None and self._applying is not None
        step: SessionStep | None = inputs.step
        while step is not None:
            for batch in step:
                self._backward(step, model, batch)
            if step.combine():
                self._applying.combined = step
                return torch.tensor(step.loss, device=self.args.device)
            step = self.session.next_step()
        self.control.should_training_stop = True  # this replica left, or another one has finished the run
        return torch.zeros((), device=self.args.device)

    def _backward(self, step: SessionStep, model: torch.nn.Module, batch: Any) -> None:
        batch = self._prepare_inputs(batch)
        super()._track_num_input_tokens(batch)
        self.current_flos += float(super().floating_point_ops(batch))
        items = self._get_num_items_in_batch([batch], self.args.device)
        count = items if items is not None else self._labels(batch)
        with self.compute_loss_context_manager():
            # A batch without a single label has the loss 0/1 and the count 0.
            loss = self.compute_loss(model, batch, num_items_in_batch=items.clamp(min=1) if items is not None else None)
        scaler = self.accelerator.scaler
        scale = float(scaler.get_scale()) if scaler is not None else 1.0
        if scaler is not None:
            scaler.scale(loss.detach())  # makes the scaler's tensors, without which it does not step
        step.backward(loss if count is None else loss * count.clamp(min=1), count=count, loss_scale=scale)

    def _labels(self, batch: Any) -> torch.Tensor | None:
        """The labels over which a model that is not told their number takes the mean; None: it is over the samples."""
        labels = batch.get("labels") if isinstance(batch, Mapping) else None
        if not isinstance(labels, torch.Tensor) or labels.is_floating_point():
            return None
        return (labels[..., 1:] if self._loss_shifts_labels else labels).ne(-100).sum()

    def _track_num_input_tokens(self, inputs: Any) -> None:
        pass  # counted in every backward pass

    def floating_point_ops(self, inputs: Any) -> int:
        """0: those of a step are counted in every backward pass."""
        return 0

    def _follow(self, state: Any, control: Any) -> None:
        """After a step: position and end of the run, as the session has them."""
        assert self.session is not None and self._applying is not None
        flow, row = self.session.flow, self._applying.row
        state.global_step = flow.step
        state.epoch = flow.ledger.total / flow.ledger.samples
        left = max(0, flow.total_samples - flow.ledger.total)
        state.max_steps = flow.step + (math.ceil(left / row.batch) if row is not None else 1)  # an estimate
        if flow.finished:
            control.should_training_stop = True
        elif row is not None and row.epoch != flow.ledger.epoch:
            control.should_epoch_stop = True
            state.max_steps = max(state.max_steps, flow.step + 1)
        else:
            state.max_steps = max(state.max_steps, flow.step + 1)

    def log(self, logs: dict[str, float], *arguments: Any, **others: Any) -> None:
        """What the Trainer logs, and with the loss of a step also its batch ratio, multiplier, workers and noise."""
        row = self._applying.row if self._applying is not None else None
        if row is not None and "loss" in logs:
            assert self.session is not None
            logs |= row.tracked(self.session.flow.optimizer.base_batch)
        super().log(logs, *arguments, **others)

    def _save_checkpoint(self, *arguments: Any, **others: Any) -> None:
        if not self._live or self.session.first:  # type: ignore[union-attr]
            super()._save_checkpoint(*arguments, **others)


class _DerivedState:
    """State of a scheduler that follows from the position in the data, so that nothing has to be sent to a replica."""

    def step(self) -> None:
        """Nothing happens: the Trainer steps the scheduler."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


class ElasticTrainer(ElasticTrainerMixin):
    """The Trainer of transformers, elastic: see `ElasticTrainerMixin`."""
