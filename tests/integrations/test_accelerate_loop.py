"""`prepare` for loops with accelerate."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate", reason="accelerate is not installed: pip install 'ebbflow[transformers]'")

from ebbflow.errors import ConfigError
from ebbflow.integrations.accelerate import _Clipping, prepare
from integrations import several_ranks

pytestmark = pytest.mark.slow  # all of it together: it imports accelerate

EIGHT = {"trace": "constant(workers=8)", "epochs": 3}


@cache
def main() -> Any:
    return several_ranks.accelerate_loop()


def weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_a_loop_trains_the_same_on_eight_workers_as_on_one_with_the_whole_batch() -> None:
    """With a scheduler and with clipping, which see whole steps."""
    model, optimizer, _ = main()(EIGHT, batch_size=4, epochs=1, clip=0.3)
    whole, reference, _ = main()({"trace": "constant(workers=1)", "epochs": 3}, batch_size=32, epochs=1, clip=0.3)
    assert optimizer.optimizer.updates == reference.optimizer.updates == 16  # of 500 samples, 32 at a time
    assert optimizer.optimizer.last.stats["clipped"] == 1
    torch.testing.assert_close(weights(model), weights(whole), rtol=1e-3, atol=1e-4)


def test_accumulated_batches_are_those_of_one_worker() -> None:
    """Four workers with 2 batches of 4 each have the micro-batches of eight workers with one each."""
    four, optimizer, _ = main()({"trace": "constant(workers=4)", "epochs": 3}, batch_size=4, accumulation=2, epochs=1)
    eight, _, _ = main()(EIGHT, batch_size=4, epochs=1)
    assert optimizer.optimizer.updates == 16 and torch.equal(weights(four), weights(eight))


def test_the_scheduler_counts_reference_steps_and_the_rule_multiplies_once() -> None:
    """After an epoch of four the cosine is at 3e-3 * (1 + cos(15/64 pi))/2: of 500/32 = 15.6 steps 15 are complete, and
    64 = 4 * 16 is the length that the script says. The last step has 500 - 7 * 64 = 52 samples."""
    _, optimizer, _ = main()({"trace": "constant(workers=4)", "epochs": 4}, batch_size=16, epochs=1)
    elastic = optimizer.optimizer
    assert elastic.updates == 8 and elastic.last.multiplier == pytest.approx(math.sqrt(52 / 32))
    assert elastic.param_groups[0]["lr"] == pytest.approx(1.5e-3 * (1 + math.cos(15 / 64 * math.pi)))


def small_loop(*scheduler: Any, **settings: Any) -> tuple[Any, ...]:
    """24 samples on two workers with 3 each: 4 updates of 6 samples in an epoch, which are its reference steps."""
    from accelerate import Accelerator

    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(torch.randn(24, 2), batch_size=3, shuffle=True)  # type: ignore[arg-type]
    accelerator = Accelerator(cpu=True)
    fleet = {"trace": "constant(workers=2)", "base_batch": 6, "rule": "sqrt", "epochs": 3}
    made = [make(optimizer) for make in scheduler]
    return accelerator, made, *prepare(accelerator, model, optimizer, loader, *made, **fleet, **settings)


def an_epoch(accelerator: Any, model: Any, optimizer: Any, loader: Any) -> None:
    for x in loader:
        accelerator.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()


def halved(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


def test_a_scheduler_that_counts_epochs_is_refused_in_prepare() -> None:
    """It would be halved four times per epoch."""
    accelerator, _, model, optimizer, loader, scheduler = small_loop(halved)
    an_epoch(accelerator, model, optimizer, loader)
    with pytest.raises(ConfigError, match=r"stepped once for 4 updates of the optimizer.*do not give it to prepare"):
        scheduler.step()


def test_a_scheduler_that_is_not_given_to_prepare_counts_epochs() -> None:
    accelerator, _, model, optimizer, loader = small_loop()
    scheduler, rates = halved(optimizer.optimizer.inner), []
    for _ in range(3):
        an_epoch(accelerator, model, optimizer, loader)
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == [0.05, 0.025, 0.0125] and optimizer.optimizer.last.lr_base == 0.025


def test_a_scheduler_goes_on_after_updates_that_a_loaded_state_takes_back(tmp_path: Path) -> None:
    """Saved after the first of two updates; the second one, which the scheduler has not seen, is taken back."""
    accelerator, _, model, optimizer, loader, scheduler = small_loop(halved)
    for number, x in enumerate(loader):
        if number == 4:
            accelerator.load_state(str(tmp_path))
            break
        accelerator.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        if number == 1:
            scheduler.step()
            accelerator.save_state(str(tmp_path))
    assert optimizer.optimizer.updates == 1
    for x in loader:
        accelerator.backward(model(x).square().mean())
        optimizer.step()
        if optimizer.optimizer.updated:
            scheduler.step()
        optimizer.zero_grad()
    assert optimizer.optimizer.updates == 4 and optimizer.param_groups[0]["lr"] == 0.1 * 0.5**4


def test_a_scaler_unscales_whole_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """As fp16 does, with a scaler on the CPU: a scale of 1024 is a power of two, so that all bits are the same."""
    plain, _, _ = main()(EIGHT | {"rule": "adascale"}, batch_size=4, epochs=1)
    accelerator, scalers = main().__globals__["Accelerator"], []

    class Scaling(accelerator):  # type: ignore[misc, valid-type]
        def __init__(self, **settings: Any) -> None:
            super().__init__(**settings)
            self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=10)
            scalers.append(self.scaler)

    monkeypatch.setitem(main().__globals__, "Accelerator", Scaling)
    scaled, optimizer, _ = main()(EIGHT | {"rule": "adascale"}, batch_size=4, epochs=1)
    assert torch.equal(weights(plain), weights(scaled))
    assert optimizer.optimizer.updates == 16 and scalers[0].get_scale() == 2048  # grown once in 16 steps


def test_without_a_trace_the_workers_are_the_processes_that_there_are() -> None:
    _, optimizer, _ = main()({}, batch_size=16, epochs=1)
    assert optimizer.optimizer.updates == 32 and optimizer.optimizer.last.multiplier < 1  # 16 of 32 samples


def test_a_tracker_gets_every_step(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: pip install 'ebbflow[tensorboard]'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    _, optimizer, _ = main()(EIGHT | {"tracker": f"tensorboard({tmp_path})"}, batch_size=4, epochs=1)
    updates = optimizer.optimizer.updates
    optimizer.optimizer._tracker.close()  # which otherwise happens when the process ends
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("workers")] == list(range(updates)) and updates == 16
    assert {event.value for event in events.Scalars("workers")} == {8.0}


def test_a_loop_resumes_where_it_was_saved(tmp_path: Path) -> None:
    model, _, _ = main()(EIGHT, epochs=3)
    main()(EIGHT, folder=str(tmp_path), epochs=2)
    again, _, _ = main()(EIGHT, resume=str(tmp_path), epochs=3)
    assert torch.equal(weights(model), weights(again))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"trace": "constant(workers=8)"}, "epochs is missing"),
        ({"base_batch": None}, "base_batch is missing"),
        ({"rool": "sqrt"}, "unknown setting 'rool'; did you mean 'rule'"),
        ({"ema": 0.99}, "ema is 0.99, but the loop keeps an average of its weights itself; leave it out"),
        ({"compile": True}, "compile is True, but the loop compiles its model itself"),
        ({"offset": "1min"}, "offset is '1min', but there is no trace; give trace"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        main()(settings)


def test_what_shards_the_model_and_other_norms_are_refused() -> None:
    class Sharding:
        distributed_type = "DistributedType.FSDP"

    with pytest.raises(ConfigError, match="set up for FSDP; expected one process, or several without sharding"):
        prepare(Sharding(), torch.nn.Linear(1, 1), None, None)  # type: ignore[arg-type]
    clipping = _Clipping(None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="norm_type inf; expected 2"):
        clipping([], 1.0, math.inf)
