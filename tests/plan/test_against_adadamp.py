"""Growing policies against the authors' code: AdaDamp's dampers, run on a small problem.

`adadamp_runs.py` trains with AdaDamp's own file; what came out is recorded beside it. Where AdaDamp is installed (from
its repository; the release 0.1.0 has no RadaDamp), it runs again and has to repeat the record.
"""

from __future__ import annotations

import json
import math

import pytest

from ebbflow.plan.batch_plan import StepSize
from ebbflow.plan.growing import Growth
from ebbflow.plan.policies import GrowingPolicy, make_policy
from plan import adadamp_runs

Columns = dict[str, list[float]]
RECORDED: dict[str, Columns] = json.loads(adadamp_runs.RECORDED.read_text(encoding="utf-8"))


def growth_of(text: str) -> Growth:
    policy = make_policy(text)
    assert isinstance(policy, GrowingPolicy)
    return Growth(policy, ref_batch=32, epoch_samples=adadamp_runs.SAMPLES)


def requests(text: str, batches: list[float], *shown: dict[str, float]) -> list[int]:
    """What our policy requests before each update of a run of these batches, if the updates show these values."""
    growth, found = growth_of(text), []
    for number, batch in enumerate(batches):
        found.append(growth.requested)
        growth.observe(batch=int(batch), **(shown[number] if shown else {}))
    return found


def seen(run: Columns) -> list[dict[str, float]]:
    """Loss and squared gradient norm of every update."""
    return [{"loss": loss, "norm_sq": norm} for loss, norm in zip(run["loss"], run["norm_sq"], strict=True)]


def evaluated(run: Columns, name: str, dwell: int) -> list[dict[str, float]]:
    """AdaDamp evaluates the model of update k before update k. Ours takes the mean of the updates before it: show in
    all of them what AdaDamp evaluates at the next decision. The first updates show the initial model."""
    values = run["evaluated"]
    ahead = [values[min(-(-(k + 1) // dwell) * dwell, len(values) - 1)] for k in range(len(values))]
    return [{name: values[0] if k < dwell else ahead[k]} for k in range(len(values))]


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")  # in AdaDamp's code
def test_adadamp_s_code_still_says_what_is_recorded() -> None:
    module = adadamp_runs.damping_module()
    if module is None:
        pytest.skip("AdaDamp with RadaDamp is not installed (github.com/stsievert/adadamp); its recorded runs are used")
    found = adadamp_runs.record(module)
    assert {name: list(run) for name, run in found.items()} == {name: list(run) for name, run in RECORDED.items()}
    for name, run in found.items():
        for column, values in run.items():
            assert values == pytest.approx(RECORDED[name][column], rel=1e-4), (name, column)


def test_geo_is_geodamp() -> None:
    run = RECORDED["geo"]
    assert requests("geo(2ep, factor=3, initial=4)", run["batch"]) == run["requested"]
    # 5 x 1.5 = 7.5, ...: GeoDamp does not round its request and takes 7 samples, ours requests 8.
    run = RECORDED["geo fraction"]
    taken = [math.floor(batch) for batch in run["batch"]]
    assert requests("geo(1ep, factor=1.5, initial=5)", taken) == [math.ceil(batch) for batch in run["requested"]]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("geo", "geo(2ep, factor=3, initial=4, max_batch=60)"),
        ("geo lr", "geo(2ep, factor=5, initial=12, max_batch=12)"),
    ],
)
def test_beyond_the_largest_batch_the_rate_falls_as_adadamp_s_does(name: str, text: str) -> None:
    # A data set of 60 is AdaDamp's largest batch; GeoDampLR's is the initial one, so that only the rate changes.
    run, growth = RECORDED[name], growth_of(text)
    fleet = StepSize(workers=100, samples=100_000, time_s=0.0, duration_s=1.0)
    for batch, lr in zip(run["batch"], run["lr"], strict=True):
        size = growth.allow(fleet)
        assert size.samples == batch
        assert size.shortfall == pytest.approx(lr / run["lr"][0])
        growth.observe(batch=size.samples)


def test_pada_is_padadamp() -> None:
    run = RECORDED["pada"]
    assert requests("pada(rate=0.3, initial=4)", run["batch"]) == run["requested"]
    # By default PadaDamp changes the batch from update 100 on in every 20th; ours does in all, by the same formula.
    run = RECORDED["pada by dwell"]
    ours = requests("pada(rate=0.1, initial=4)", run["batch"])
    assert [run["requested"][k] for k in (0, 100, 120, 140)] == [ours[k] for k in (0, 100, 120, 140)] == [4, 14, 16, 18]


def test_ada_is_adadamp() -> None:
    run = RECORDED["ada"]
    assert requests("ada(initial=8)", run["batch"], *evaluated(run, "loss", 20)) == run["requested"]
    run = RECORDED["ada often"]
    shown = evaluated(run, "loss", 3)
    assert requests("ada(initial=8, dwell=3, wait=6)", run["batch"], *shown) == run["requested"]
    # The loss of the initial model is that of the first update; a mean would include models that have changed.
    later = [shown[0], *({"loss": 0.9 * shown[0]["loss"]} for _ in shown[1:3]), *shown[3:]]
    assert requests("ada(initial=8, dwell=3, wait=6)", run["batch"], *later) == run["requested"]


def test_ada_norm_is_adadampnn() -> None:
    run = RECORDED["ada-norm"]
    assert requests("ada-norm(initial=8)", run["batch"], *evaluated(run, "signal", 20)) == run["requested"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("rada", "rada(initial=40)"),
        ("rada often", "rada(initial=6, dwell=5, wait=10, rho=0.6)"),
        ("rada late", "rada(initial=6, dwell=8, wait=0)"),
    ],
)
def test_rada_is_radadamp(name: str, text: str) -> None:
    run = RECORDED[name]
    assert requests(text, run["batch"], *seen(run)) == run["requested"]
    assert len(set(run["requested"])) > 3, "the batch did change"
