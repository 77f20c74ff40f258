"""`prepare` for loops with accelerate."""

from __future__ import annotations

import runpy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate", reason="accelerate is not installed: pip install 'ebbflow[transformers]'")

from ebbflow.errors import ConfigError
from ebbflow.integrations.accelerate import prepare

pytestmark = pytest.mark.slow  # all of it together: it imports accelerate

EIGHT = {"trace": "constant(workers=8)", "epochs": 3}


@cache
def main() -> Any:
    return runpy.run_path(str(Path(__file__).resolve().parents[2] / "examples" / "accelerate_loop.py"))["main"]


def weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_a_loop_trains_the_same_on_eight_workers_as_on_one_with_the_whole_batch() -> None:
    model, optimizer, _ = main()(EIGHT, batch_size=4, epochs=1)
    whole, reference, _ = main()({"trace": "constant(workers=1)", "epochs": 3}, batch_size=32, epochs=1)
    assert optimizer.optimizer.updates == reference.optimizer.updates == 57  # of 1797 samples, 32 at a time
    torch.testing.assert_close(weights(model), weights(whole), rtol=1e-3, atol=1e-4)


def test_without_a_trace_the_workers_are_the_processes_that_there_are() -> None:
    _, optimizer, _ = main()({}, batch_size=16, epochs=1)
    assert optimizer.optimizer.updates == 113 and optimizer.optimizer.last.multiplier < 1  # 16 of 32 samples


def test_a_loop_resumes_where_it_was_saved(tmp_path: Path) -> None:
    model, _, _ = main()(EIGHT, epochs=3)
    main()(EIGHT, folder=str(tmp_path), epochs=2)
    again, _, _ = main()(EIGHT, folder=str(tmp_path), resume=True, epochs=3)
    assert torch.equal(weights(model), weights(again))


def test_accumulation_by_accelerate_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = main().__globals__["Accelerator"]

    class Accumulating(accelerator):  # type: ignore[misc, valid-type]
        def __init__(self, **settings: Any) -> None:
            super().__init__(gradient_accumulation_steps=4, **settings)

        def backward(self, loss: torch.Tensor, **settings: Any) -> None:
            self._do_sync()  # as `with accelerator.accumulate(model)` does
            super().backward(loss, **settings)

    monkeypatch.setitem(main().__globals__, "Accelerator", Accumulating)
    with pytest.raises(ConfigError, match=r"the loop took 4 micro-batches since the last step.*accumulation="):
        main()(EIGHT, batch_size=4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"trace": "constant(workers=8)"}, "epochs is missing"),
        ({"base_batch": None}, "base_batch is missing"),
        ({"rool": "sqrt"}, "unknown setting 'rool'; did you mean 'rule'"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        main()(settings)


def test_several_processes_and_a_scaler_of_accelerate_are_refused() -> None:
    class Several:
        num_processes, scaler = 2, None

    class Scaling:
        num_processes, scaler = 1, object()

    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for accelerator, message in ((Several(), "2 processes"), (Scaling(), "use 'bf16'")):
        with pytest.raises(ConfigError, match=message):
            prepare(accelerator, model, optimizer, None, base_batch=8)  # type: ignore[arg-type]
