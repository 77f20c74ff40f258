"""The published figures on time and money, recomputed; `docs/evidence/costs.md` says what they mean.

Every number that a test works out must also stand on that page, so that page and program cannot drift apart.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from ebbflow.core.units import Seconds
from ebbflow.plan import BatchPlan, make_policy
from ebbflow.simulate import (
    RECOVERIES,
    ComputeAndNetwork,
    FlatPrice,
    Scenario,
    Simulation,
    on_demand,
    parse_step_time,
    simulate,
)
from ebbflow.simulate.step_models import Affine, Network, ParameterServer, Ring
from ebbflow.traces import load

PAGE = Path(__file__).resolve().parents[2] / "docs" / "evidence" / "costs.md"


def assert_on_page(heading: str, *cells: str) -> None:
    """The table row of the page that begins with these cells."""
    section = PAGE.read_text(encoding="utf-8").split(f"\n## {heading}")[1].split("\n## ")[0]
    row = "| " + " | ".join(cells) + " |"
    assert row in section, f"{PAGE.name}, {heading}: no row {row}"


# -- Andre, Strati, Klimovic 2022 --------------------------------------------------------------------------------------


def imagenet(trace: object) -> Scenario:
    return Scenario(
        trace=trace, policy=make_policy("follow(128)"), model=parse_step_time("0.6s"), samples=1_281_167, epochs=90,
        price=FlatPrice(0.744), cut=False,
    )  # type: ignore[arg-type]  # fmt: skip


def test_spot_gpus_cost_112_dollars() -> None:
    found = simulate(imagenet(load("gcp-a100-2022-05")))
    hours = found.mean_workers * found.time_s / 3600
    assert_on_page("112 against 344", "spot, 0.6 s per step", f"{found.time_s / 60:.1f}", f"{hours:.1f}",
                   f"{found.cost_usd:.1f}", "112")  # fmt: skip
    assert found.cost_usd == pytest.approx(112, rel=0.005)


@pytest.mark.parametrize(("step", "published"), [("0.6s", ""), ("0.554s", "344")])
def test_sixty_four_gpus_on_demand_cost_344_dollars_at_a_shorter_step(step: str, published: str) -> None:
    found = on_demand(imagenet(load("constant(1)")), workers=64, usd_per_hour=2.48, model=parse_step_time(step))
    assert_on_page("112 against 344", f"64 on demand, {step[:-1]} s per step", f"{found.time_s / 60:.1f}",
                   f"{64 * found.time_s / 3600:.1f}", f"{found.cost_usd:.1f}", published)  # fmt: skip
    if published:
        assert found.cost_usd == pytest.approx(float(published), rel=0.005)


@pytest.mark.parametrize(
    ("recovery", "repeat", "claim"),
    [
        ("step(detect=1s)", False, '`--recovery "step(detect=1s)"` gives {usd:.1f} USD and {minutes:.1f} min'),
        ("checkpoint", True, "{usd:.0f} USD and {hours:.1f} h, since"),
    ],
)
def test_what_interruptions_add_to_the_112_dollars(recovery: str, repeat: bool, claim: str) -> None:
    """The command of the page with one option more; `--across-epochs` holds for it, too."""
    plain = imagenet(load("gcp-a100-2022-05"))
    found = simulate(dataclasses.replace(plain, recovery=RECOVERIES.make(recovery), repeat=repeat))
    text = claim.format(usd=found.cost_usd, minutes=found.time_s / 60, hours=found.time_s / 3600)
    assert text in " ".join(PAGE.read_text(encoding="utf-8").split())


TASKS = ((128, "0.6s", 1_281_167, 90), (32, "0.3s", 118_287, 65))
"""(samples per accelerator, step, samples, epochs) of ImageNet and of COCO."""


def whole_minutes(trace: str, begins: range, task: tuple[int, str, int, int]) -> list[float]:
    """The length of a run for each beginning, in minutes, as far as the trace is long enough."""
    local_batch, step, samples, epochs = task
    found = []
    for begin in begins:
        plan = BatchPlan.from_trace(load(trace), f"follow({local_batch})", step, offset=Seconds(60.0 * begin))
        if plan.samples_before(plan.steps or 0) >= samples * epochs:
            found.append(plan.for_epochs(samples, epochs, cut=False).time_s / 60)
    return found


@pytest.mark.parametrize(
    ("row", "trace", "begins"),
    [
        ("A100, minute 0", "gcp-a100-2022-05", range(1)),
        ("A100, every minute from which it is long enough", "gcp-a100-2022-05", range(218)),
        ("TPU cores, minute 0", "gcp-tpuv2-2022-04", range(1)),
        ("TPU cores, minute 212", "gcp-tpuv2-2022-04", range(212, 213)),
        ("TPU cores, every minute of the first ten hours", "gcp-tpuv2-2022-04", range(601)),
    ],
)
def test_two_hundred_to_275_minutes_are_what_the_traces_allow_or_not(row: str, trace: str, begins: range) -> None:
    cells = []
    for task in TASKS:
        found = whole_minutes(trace, begins, task)
        cells.append(" to ".join(f"{length:.1f}" for length in sorted({min(found), max(found)})))
    assert_on_page('"200 to 275 minutes"', row, *cells)


# -- Lin et al. 2019, Table 2 ------------------------------------------------------------------------------------------

MEGABYTES = 25.557 * 4
PER_SAMPLE = Seconds(1024 / 4944 / 128)
ROWS = (("8 GPUs, 1,024 samples", 8, 1024, 4944), ("96 GPUs, 1,024 samples", 96, 1024, 335),
        ("96 GPUs, 12,288 samples", 96, 12288, 40095))  # fmt: skip


def throughput(gbps: float, overlap: float) -> list[float]:
    model = ComputeAndNetwork(per_sample=PER_SAMPLE, network=Ring(MEGABYTES, gbps, per_machine=8), overlap=overlap)
    workers, samples = np.array([row[1] for row in ROWS]), np.array([row[2] for row in ROWS])
    return list(samples / model.breakdown(workers, samples).total)


def test_the_growing_batch_fits_a_ring_and_the_fixed_one_fits_none() -> None:
    link, plain, hidden = throughput(25.0, 0.0), throughput(15.09, 0.0), throughput(4.892, 1.0)
    for (name, _, _, published), a, b, c in zip(ROWS, link, plain, hidden, strict=True):
        assert_on_page("Lin et al.", name, f"{published:,}", f"{a:,.0f}", f"{b:,.0f}", f"{c:,.0f}")
    for fit in (plain, hidden):
        assert fit[0] == pytest.approx(4944)
        assert fit[2] == pytest.approx(40095, rel=1e-3)
        # Whatever the network does, the exchange is the same for both batches: no fit comes near 335.
        assert fit[1] > 9 * 335


# -- Holt, Sievert 2021, Tables 1 and 2, Figure 7 ----------------------------------------------------------------------

SCHEDULES = {
    "5.1k (*2)": ((60, 256, 2), (60, 1280, 10), (80, 5120, 40)),
    "3.2k": ((60, 128, 1), (60, 640, 5), (80, 3200, 25)),
    "16k": ((60, 128, 1), (60, 640, 5), (60, 3200, 25), (20, 16000, 125)),
    "640": ((60, 128, 1), (140, 640, 5)),
    "128": ((200, 128, 1),),
}
"""(epochs, batch, workers): five times the batch and the workers at epochs 60, 120 and 180, up to the maximum."""
PUBLISHED = {
    "5.1k (*2)": (14960, 69.9, 45.1, 43.5),
    "3.2k": (29480, 107.2, 67.7, 65.5),
    "16k": (29240, 107.5, 67.7, 65.7),
    "640": (34520, 116.9, 73.6, 71.8),
    "128": (78200, 200.2, 121.7, 121.5),
}
"""(updates, minutes centralized, decentralized-moderate, decentralized-high)."""


def phases(name: str, per_sample: float, network: Network | None) -> list[Simulation]:
    model = ComputeAndNetwork(per_sample=Seconds(per_sample), network=network)
    return [
        simulate(
            Scenario(
                trace=load(f"constant({workers})"), policy=make_policy(f"follow({batch // workers})"), model=model,
                samples=50_000, epochs=epochs, price=FlatPrice(0.0), repeat=True,
            )
        )
        for epochs, batch, workers in SCHEDULES[name]
    ]  # fmt: skip


def minutes(name: str, per_sample: float, network: Network | None) -> float:
    return sum(found.time_s for found in phases(name, per_sample, network)) / 60


def each(seconds: float) -> Affine:
    """So many seconds for every worker after the first."""
    return Affine(first=Seconds(seconds), more=Seconds(seconds))


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_numbers_of_updates_are_the_published_ones(name: str) -> None:
    assert sum(found.steps for found in phases(name, 0.001, None)) == PUBLISHED[name][0]


ALONE = (
    (200.2 * 60 / 10**7, ParameterServer(11.0, 54.0, Seconds(5e-8))),
    (121.7 * 60 / 10**7, Ring(11.0, 54.0, Seconds(5e-8))),
    (121.5 * 60 / 10**7, Ring(11.0, 800.0, Seconds(2.5e-8))),
)
"""The networks of the paper as they are given: computing from the row of one worker."""
FITTED = ((0.001247, each(0.0309)), (0.0007595, each(0.02145)), (0.0007551, each(0.01976)))


@pytest.mark.parametrize("name", SCHEDULES)
def test_training_minutes_on_three_networks(name: str) -> None:
    updates, *published = PUBLISHED[name]
    alone = [minutes(name, per_sample, network) for per_sample, network in ALONE]
    fitted = [minutes(name, per_sample, network) for per_sample, network in FITTED]
    triples = [f"{p:.1f} / {a:.1f} / {f:.1f}" for p, a, f in zip(published, alone, fitted, strict=True)]
    assert_on_page("Holt and Sievert", name, f"{updates:,}", *triples)
    assert fitted == pytest.approx(published, rel=0.05)
    if name != "128":  # the figures of the network alone say far too little
        assert all(a < 0.8 * p for a, p in zip(alone[1:], published[1:], strict=True))


def test_more_workers_stop_helping_at_128_samples_a_worker() -> None:
    per_sample, network = FITTED[2]
    model = ComputeAndNetwork(per_sample=Seconds(per_sample), network=network)
    seconds = {}
    for workers in (1, 2, 4, 8, 16):
        scenario = Scenario(
            trace=load(f"constant({workers})"), policy=make_policy(f"follow({512 // workers})"), model=model,
            samples=50_000, epochs=1, price=FlatPrice(0.0), repeat=True,
        )  # fmt: skip
        seconds[workers] = simulate(scenario).time_s
        assert_on_page("Figure 7", f"{workers}", f"{512 // workers}", f"{seconds[workers]:.1f}")
    assert min(seconds, key=lambda workers: seconds[workers]) == 4
