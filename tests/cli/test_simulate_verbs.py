"""simulate, compare, whatif and profile as scripts and users see them: fixed JSON, pages, and bad input."""

from __future__ import annotations

import dataclasses
import json
import warnings
from pathlib import Path

import pytest
from typer.main import get_command

from cli.answers import Ebbflow
from ebbflow.cli.main import app
from ebbflow.core.units import format_seconds
from ebbflow.plan.policies import POLICIES, make_policy
from ebbflow.report.simulation_page import simulation_figures
from ebbflow.simulate import FlatPrice, Scenario, ScenarioSettings, Simulation, parse_step_time, prices, simulate
from ebbflow.traces import GENERATORS, load


@pytest.fixture
def ebbflow(ebbflow: Ebbflow) -> Ebbflow:
    """One text, split at spaces, then single arguments."""
    return lambda text, *arguments: ebbflow(*text.split(), *arguments)


TASK = "--samples 1000 --epochs 1 --local-batch 10"
PRICES = "--spot-price 3.6 --price 36"
STEP = "--step-time 1s"
FLEET = "0s:4 10s:2 1h"


def test_simulate_answers_in_the_fixed_shape(ebbflow: Ebbflow) -> None:
    answer = ebbflow(f"simulate {TASK} {STEP} {PRICES} --json", FLEET)
    assert answer.code == 0, answer.err
    found = json.loads(answer.out)
    # 400 samples in 10 s on 4 workers, 600 in 30 s on 2: 100 worker-seconds, 2.5 workers on average, so 3 on demand:
    # steps of 30 samples, 33 and a smaller one, 102 worker-seconds.
    assert found == {
        "time_s": 40.0,
        "cost_usd": pytest.approx(0.1),
        "on_demand": {"time_s": 34.0, "cost_usd": pytest.approx(1.02), "workers": 3},
        "steps": 40,
        "samples": 1000,
        "goodput": 25.0,
        "breakdown": {"compute": 40.0, "network": 0.0, "waiting": 0.0, "lost": 0.0, "restart": 0.0, "checkpoint": 0.0},
    }


def test_simulate_prints_a_table_that_fits_a_terminal(ebbflow: Ebbflow) -> None:
    answer = ebbflow(f"simulate {TASK} {STEP} {PRICES} --recovery step(detect=1s)", FLEET)
    assert answer.code == 0, answer.err
    assert "2 on demand" in answer.out
    assert "restart" in answer.out
    assert max(map(len, answer.out.splitlines())) <= 80


def test_seeds_give_intervals(ebbflow: Ebbflow) -> None:
    fleet = "poisson(4, preempt_every=1min, provision=20s, duration=1h)"
    found = json.loads(ebbflow(f"simulate {TASK} {STEP} {PRICES} --seeds 8 --json", fleet).out)
    assert found["seeds"]["count"] == 8
    spread = found["seeds"]["time_s"]
    assert 25 <= spread["low"] <= spread["mean"] <= spread["high"]
    table = ebbflow(f"simulate {TASK} {STEP} {PRICES} --seeds 8", fleet).out
    shown = [format_seconds(spread[name]) for name in ("mean", "low", "high")]
    assert "{}, {} to {}".format(*shown) in table
    refused = ebbflow(f"simulate {TASK} {STEP} {PRICES} --seeds 8", FLEET)
    assert refused.code == 2
    assert "--seeds draws nothing here" in refused.err


def test_prices_come_from_a_history_too(ebbflow: Ebbflow, tmp_path: Path) -> None:
    history = tmp_path / "prices.csv"
    history.write_text("time_s,zone,usd_per_hour\n0,a,3.6\n0,b,7.2\n4000,a,3.6\n")
    task = f"simulate {TASK} {STEP} --price 36 --price-history prices.csv --json"
    assert json.loads(ebbflow(task, FLEET).out)["cost_usd"] == pytest.approx(0.15)
    assert json.loads(ebbflow(f"{task} --zone b", FLEET).out)["cost_usd"] == pytest.approx(0.2)
    late = ebbflow(f"{task} --price-offset 3970s", FLEET)
    assert late.code == 2
    assert "prices.csv covers 30.0 s, the run takes 40.0 s" in late.err


def test_a_page_is_written_whole_and_loads_nothing(ebbflow: Ebbflow, tmp_path: Path) -> None:
    answer = ebbflow(f"simulate {TASK} {STEP} {PRICES} --recovery step(detect=1s) --out page --json", FLEET)
    assert answer.code == 0, answer.err
    page = (tmp_path / "page" / "index.html").read_text()
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert "https://" not in page
    assert 'data-figure="time"' in page
    assert 'data-figure="cost"' in page
    assert {path.name for path in (tmp_path / "page" / "figures").iterdir()} >= {"time.svg", "cost.svg", "trade.png"}
    assert ebbflow(f"simulate {TASK} {STEP} {PRICES} --out page --json", FLEET).code == 0  # a page may be replaced
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    refused = ebbflow(f"simulate {TASK} {STEP} {PRICES} --out mine --json", FLEET)
    assert refused.code == 2
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "precious"


def test_compare_marks_what_nothing_beats(ebbflow: Ebbflow, tmp_path: Path) -> None:
    text = (
        f"compare {TASK} {STEP} --spot-price 3.6 --price 36 --policy follow --policy capped(max_workers=1) "
        f"--recovery ideal --recovery checkpoint(every=5s,write=1s,detect=1s,restart=5s)"
    )
    found = json.loads(ebbflow(f"{text} --json --out page", FLEET).out)
    by_name = {one["name"]: one for one in found}
    assert len(by_name) == 6  # two policies x two recoveries, and an on-demand cluster a policy
    assert [name for name, one in by_name.items() if one["pareto"]] == [
        f"{FLEET} · follow · ideal",
        "3 on demand · follow",
    ]
    follow = by_name[f"{FLEET} · follow · ideal"]
    assert follow["time_s"] == 40.0
    assert by_name[f"{FLEET} · capped(max_workers=1) · ideal"]["time_s"] == 100.0
    restarted = by_name[f"{FLEET} · follow · checkpoint(every=5s,write=1s,detect=1s,restart=5s)"]
    assert restarted["breakdown"]["checkpoint"] > 0
    assert 'data-figure="trade"' in (tmp_path / "page" / "index.html").read_text()
    table = ebbflow(text, FLEET).out
    assert any(line.startswith("*") and FLEET in line for line in table.splitlines())
    # 100 steps of a second on one worker, of 220 worker-seconds that are paid for.
    assert by_name[f"{FLEET} · capped(max_workers=1) · ideal"]["computing"] == pytest.approx(100 / 220)
    assert follow["computing"] == pytest.approx(1.0)


def test_a_page_does_not_say_that_all_is_computing_while_paid_workers_idle(ebbflow: Ebbflow, tmp_path: Path) -> None:
    text = f"compare {TASK} {STEP} --spot-price 3.6 --policy capped(max_workers=1) --json --out page"
    assert ebbflow(text, FLEET).code == 0
    page = (tmp_path / "page" / "index.html").read_text()
    assert "Of the worker time that 0s:4 10s:2 1h pays for, 45% is computing." in page
    assert "100%" not in page.split("<main>")[0].split("takeaway")[-1]


def test_in_a_page_of_many_no_two_look_the_same_and_the_legend_leaves_the_figure_its_size(ebbflow: Ebbflow) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the layout warns where the legend leaves the panels no room
        policies = " ".join(f"--policy capped(max_workers={count})" for count in range(1, 14))
        answer = ebbflow(f"compare {TASK} {STEP} --spot-price 3.6 {policies} --out page --json --repeat", FLEET)
    assert answer.code == 0, answer.err
    found = {name: simulate_one(cap) for cap in range(1, 14) for name in [f"at most {cap} workers of a long name"]}
    *_, trade = simulation_figures(found)
    points = [line for line in trade.figure.axes[0].lines if line.get_linestyle() == "None"]
    assert len({(line.get_color(), line.get_marker()) for line in points}) == len(points) == 13
    trade.figure.draw_without_rendering()
    inches = trade.figure.axes[0].get_position().height * trade.figure.get_figheight()
    assert inches > 2.5  # of 3.6 with labels; beside a legend of 13 rows it was less than 1


def simulate_one(cap: int) -> Simulation:
    return simulate(
        Scenario(
            trace=load("constant(16)"), policy=make_policy("follow(10)"), model=parse_step_time("1s"), samples=1000,
            epochs=1, price=FlatPrice(3.6), max_workers=cap,
        )
    )  # fmt: skip


def test_compare_takes_one_price_for_each_trace(ebbflow: Ebbflow) -> None:
    found = json.loads(ebbflow(f"compare {TASK} {STEP} --spot-price 1 --spot-price 2 --json", "0s:4 1h", "0s:5 1h").out)
    assert [one["cost_usd"] for one in found] == pytest.approx([100 / 3600, 200 / 3600])
    refused = ebbflow(f"compare {TASK} {STEP} --spot-price 1 --spot-price 2", "0s:4 1h", "0s:5 1h", "0s:6 1h")
    assert refused.code == 2
    assert "2 spot prices for 3 traces" in refused.err


def test_compare_tells_files_of_one_name_apart_by_their_folders(ebbflow: Ebbflow, tmp_path: Path) -> None:
    for month, workers in (("june", 4), ("july", 5)):
        (tmp_path / month).mkdir()
        (tmp_path / month / "spot.csv").write_text(f"time_s,accelerators\n0,{workers}\n3600,{workers}\n")
    found = json.loads(ebbflow(f"compare {TASK} {STEP} --spot-price 1 --json", "june/spot.csv", "july/spot.csv").out)
    assert [one["name"] for one in found] == ["june/spot.csv", "july/spot.csv"]
    alone = json.loads(ebbflow(f"compare {TASK} {STEP} --spot-price 1 --json", "june/spot.csv", "0s:5 1h").out)
    assert [one["name"] for one in alone] == ["spot.csv", "0s:5 1h"]


WHATIF = "whatif --samples 800 --epochs 10 --step-time 1s --spot-price 3600"


def test_whatif_finds_the_cheapest_before_a_deadline(ebbflow: Ebbflow) -> None:
    answer = ebbflow(f"{WHATIF} --deadline 300s --max-workers 1,3,7 --local-batch 10 --json", "0s:8 10h")
    found = json.loads(answer.out)
    # 80, 27 or 12 steps per epoch: 800, 270 or 120 s for 800, 810 or 840 USD.
    assert found["setting"] == {"max_workers": 3, "local_batch": 10, "policy": "follow"}
    assert (found["time_s"], found["cost_usd"]) == (270.0, pytest.approx(810))
    assert found["settings"] == {"tried": 3, "ended": 3}
    assert [one["time_s"] for one in found["pareto"]] == [120, 270, 800]
    assert {one["name"]: one["met"] for one in found["sensitivity"]}["steps 10% slower"] is True
    assert "the cheapest of 3 settings" in ebbflow(
        f"{WHATIF} --deadline 300s --max-workers 1,3,7 --local-batch 10", "0s:8 10h"
    ).out  # fmt: skip


def test_whatif_leaves_out_what_outlasts_the_prices(ebbflow: Ebbflow, tmp_path: Path) -> None:
    (tmp_path / "prices.csv").write_text("time_s,usd_per_hour\n0,3600\n300,3600\n")
    priced = WHATIF.replace("--spot-price 3600", "--price-history prices.csv --local-batch 10 --deadline 1h")
    found = json.loads(ebbflow(f"{priced} --max-workers 1,3,7 --json", "0s:8 10h").out)
    assert found["settings"] == {"tried": 3, "ended": 2}
    assert (found["time_s"], found["cost_usd"]) == (270.0, pytest.approx(810))
    nothing = ebbflow(f"{priced} --max-workers 1,2", "0s:8 10h")
    assert nothing.code == 2
    assert "none of 2 settings comes to an end; the first: prices.csv covers 5.0 min" in nothing.err


def test_of_settings_that_cost_the_same_to_the_cent_the_fastest_is_the_cheapest(ebbflow: Ebbflow) -> None:
    # 200 steps on 5 workers and 143 on 7 are 1,000 and 1,001 worker-seconds: 1.000 and 1.001 USD.
    text = "whatif --samples 1000 --epochs 1 --step-time 1s --spot-price 3.6 --deadline 1h --local-batch 1"
    found = json.loads(ebbflow(f"{text} --max-workers 5,7 --json", "0s:8 10h").out)
    assert (found["setting"]["max_workers"], found["time_s"]) == (7, 143.0)
    assert [one["time_s"] for one in found["pareto"]] == [143.0]


def test_whatif_finds_the_fastest_within_a_budget(ebbflow: Ebbflow) -> None:
    text = f"{WHATIF} --budget 820 --max-workers 1:7:2 --local-batch 10 --policy follow --policy capped(max_batch=20)"
    found = json.loads(ebbflow(f"{text} --json", "0s:8 10h").out)
    # 5 workers take 16 steps per epoch: 160 s for 800 USD.
    assert (found["setting"]["max_workers"], found["time_s"]) == (5, 160.0)
    assert found["settings"]["tried"] == 8


def test_whatif_says_what_a_further_worker_is_worth(ebbflow: Ebbflow) -> None:
    # Workers of 10 samples, steps of 1 s, a price of 1 USD per second and worker; noise scale 30, reference batch 10.
    # One worker: 10 samples per second, 100,000 USD per million. Two: 20 x 40/50 = 16, six tenths more. Four: 40 x
    # 40/70 = 160/7 for 4 USD; a fifth makes it 50 x 40/80 = 25.
    text = f"{WHATIF} --deadline 1h --max-workers 4 --local-batch 10 --noise-scale 30 --ref-batch 10"
    worth = json.loads(ebbflow(f"{text} --json", "0s:8 10h").out)["worth"]
    assert [one["now"]["workers"] for one in worth] == [1, 2, 4]
    assert worth[0]["now"] == {
        "workers": 1, "batch": 10, "efficiency": 1.0, "samples_per_progress": 1.0, "goodput": 10.0,
        "usd_per_million": pytest.approx(1e5),
    }  # fmt: skip
    assert (worth[0]["gain"], worth[0]["share"]) == pytest.approx((0.6, 0.6))
    assert worth[2]["now"]["efficiency"] == pytest.approx(4 / 7)
    assert worth[2]["now"]["usd_per_million"] == pytest.approx(4 / (160 / 7) * 1e6)
    assert worth[2]["more"]["goodput"] == pytest.approx(25)
    shown = ebbflow(text, "0s:8 10h").out
    assert "what a worker is worth" in shown and max(map(len, shown.splitlines())) <= 80
    without = ebbflow(f"{WHATIF} --deadline 1h --max-workers 4 --local-batch 10", "0s:8 10h").out
    assert "give --noise-scale and --ref-batch" in " ".join(without.split())


def test_whatif_says_the_best_that_can_be_had(ebbflow: Ebbflow) -> None:
    refused = ebbflow(f"{WHATIF} --deadline 10s --max-workers 1,3,7 --local-batch 10 --json", "0s:8 10h")
    assert refused.code == 2
    assert (
        "none of 3 settings ends within 10.0 s; the fastest takes 2.0 min and costs 840.00 USD: at most 7 workers"
        in (refused.err)
    )


@pytest.mark.parametrize("verb", ["simulate", "compare", "whatif"])
def test_every_setting_of_a_scenario_is_an_option_of_each_verb(verb: str) -> None:
    (command,) = [command for command in get_command(app).commands.values() if command.name == verb]  # type: ignore[attr-defined]
    options = {option for parameter in command.params for option in parameter.opts}
    settings = {f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(ScenarioSettings)}
    assert settings | {"--plugin", "--json"} <= options


@pytest.mark.parametrize(("verb", "offered"), [("simulate", True), ("compare", True), ("whatif", False)])
def test_the_help_offers_the_on_demand_cluster_where_there_is_one(ebbflow: Ebbflow, verb: str, offered: bool) -> None:
    text = ebbflow(f"{verb} --help").text
    assert "--spot-price" in text
    for option in ("--price ", "--on-demand-workers", "--on-demand-step-time"):
        assert (option in text) == offered


PLUGIN = """
from dataclasses import dataclass

import numpy as np

import ebbflow
from ebbflow.plan.policies import POLICIES
from ebbflow.traces import GENERATORS, Trace


@ebbflow.register_price("two-tariffs")
@dataclass(frozen=True)
class TwoTariffs:
    first: float
    later: float
    hours: float = 1.0

    def integral(self, times):
        change = self.hours * 3600
        return (np.minimum(times, change) * self.first + np.maximum(times - change, 0.0) * self.later) / 3600


@ebbflow.register_price("no-price")
@dataclass(frozen=True)
class NoPrice:
    pass


@POLICIES.register("half", kind="fleet")
@dataclass(frozen=True)
class Half:
    local_batch: int

    def sizes(self, workers):
        return workers // 2, workers // 2 * self.local_batch


@GENERATORS.register("pair")
def pair(first: int, second: int) -> Trace:
    return Trace.parse(f"0s:{first} 10s:{second} 1h")
"""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A plugin with a price model, a policy and a trace generator; what it registers is forgotten after the test."""
    for registry in (prices.PRICES, POLICIES, GENERATORS):
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    path = tmp_path / "mine.py"
    path.write_text(PLUGIN)
    return path


def test_prices_policies_and_traces_of_a_plugin_are_simulated(ebbflow: Ebbflow, plugin: Path) -> None:
    # Half of 8 and of 4 workers at 10 samples each: 10 steps of 40, then 30 of 20, so 8 x 10 s + 4 x 30 s are paid:
    # 15 s at a dollar per second, then half a dollar. 8 x 10 + 4 x 5 = 100 USD, and 4 x 25 / 2 = 50 USD.
    mine = f"{TASK} {STEP} --plugin {plugin} --policy half --json"
    tariffs = "two-tariffs(3600, later=1800, hours=0.004166666666666667)"
    answer = ebbflow(f"simulate {mine} --price 36 --spot-price", tariffs, "pair(8, 4)")
    assert answer.code == 0, answer.err
    assert (json.loads(answer.out)["time_s"], json.loads(answer.out)["cost_usd"]) == (40.0, pytest.approx(150))
    compared = ebbflow(f"compare {mine} --spot-price 3600 --spot-price", tariffs, "pair(8, 4)", "pair(8, second=4)")
    assert [one["cost_usd"] for one in json.loads(compared.out)] == pytest.approx([200, 150])
    tried = ebbflow(f"whatif {mine} --budget 160 --max-workers 4,8 --spot-price", tariffs, "pair(8, 4)")
    assert tried.code == 0, tried.err
    found = json.loads(tried.out)
    assert found["cost_usd"] == pytest.approx(150)
    varied = {one["name"]: one["cost_usd"] for one in found["sensitivity"]}
    assert varied["price 10% higher"] == pytest.approx(165)


def test_a_registered_class_that_is_no_price_model_is_refused(ebbflow: Ebbflow, plugin: Path) -> None:
    answer = ebbflow(f"simulate {TASK} {STEP} --price 1 --plugin {plugin} --spot-price no-price", FLEET)
    assert answer.code == 2
    assert "the price model no-price is a NoPrice, which has no method integral(times)" in answer.err


def test_a_workload_of_a_plugin_is_profiled(ebbflow: Ebbflow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ebbflow.workloads import WORKLOADS

    monkeypatch.setattr(WORKLOADS, "_entries", dict(WORKLOADS._entries))
    (tmp_path / "mine.py").write_text(
        "from ebbflow.workloads import WORKLOADS\nWORKLOADS.register('my-digits')(WORKLOADS.entry('digits-mlp').make)\n"
    )
    answer = ebbflow("profile my-digits --plugin mine.py --local-batch 16 --steps 2 --json")
    assert answer.code == 0, answer.err
    assert [one["samples"] for one in json.loads(answer.out)["measured"]] == [16]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"simulate {TASK} {STEP} --price 36", "give the price of a worker: --spot-price"),
        (f"simulate {TASK} {STEP} --spot-price 1", "give the on-demand price"),
        (f"simulate {TASK} {STEP} --spot-price -1 --price 1", "the price is -1 USD per hour"),
        (f"simulate {TASK} {STEP} --spot-price 1 --price -1", "the price is -1 USD per hour"),
        (f"simulate {TASK} {STEP} --spot-price nan --price 1", "expected a finite number"),
        (f"simulate {TASK} {STEP} --spot-price flt(1) --price 1", "unknown price model 'flt'; did you mean 'flat'"),
        (f"simulate {TASK} {STEP} --spot-price 1 --price 1 --price-history x.csv", "one of the two"),
        (f"simulate {TASK} {STEP} {PRICES} --zone a", "--zone is for a price history, and --spot-price"),
        (f"simulate {TASK} {STEP} {PRICES} --price-offset 1h", "--price-offset is for a price history"),
        (f"simulate {TASK} --step-time 0.6 {PRICES}", "duration '0.6' has no unit; write 0.6s"),
        (f"simulate {TASK} --step-time 0s {PRICES}", "expected a finite time above 0"),
        (f"simulate {TASK} {PRICES}", "say how long a step takes in one way"),
        (f"simulate {TASK} {STEP} --compute-sample 1ms {PRICES}", "say how long a step takes in one way"),
        (f"simulate {TASK} {STEP} {PRICES} --network ring(1,gbps=1)", "--step-time is the time of the whole step"),
        (f"simulate {TASK} --step-time 4:1s,4:2s {PRICES}", "have 4 workers twice"),
        (f"simulate {TASK} {STEP} {PRICES} --overlap 0.5", "--overlap would change nothing"),
        (f"simulate {TASK} {STEP} {PRICES} --on-demand-workers 0", "Invalid value for '--on-demand-workers'"),
        (f"simulate --samples 1000 --epochs 1 {STEP} {PRICES}", "or write it into the policy: follow(32)"),
        (f"simulate {TASK} --compute-sample 1ms {PRICES} --network rign(1,gbps=1)", "did you mean 'ring'"),
        (f"simulate {TASK} --compute-sample 1ms {PRICES} --network ring(1,gbps=1,latency=5)", "has no unit"),
        (f"simulate {TASK} {STEP} {PRICES} --recovery chekpoint", "did you mean 'checkpoint'"),
        (f"simulate {TASK} {STEP} {PRICES} --noise-scale 100", "--noise-scale needs --ref-batch"),
        (f"simulate {TASK} {STEP} {PRICES} --policy folow", "did you mean 'follow'"),
        (f"simulate {TASK} {STEP} {PRICES} --provisioning 5", "has no unit"),
        (f"simulate {TASK} {STEP} {PRICES} --profile missing.json", "say how long a step takes in one way"),
        (f"simulate {TASK} {PRICES} --profile missing.json", "missing.json: no such file"),
        (f"simulate --samples 9999999999 --epochs 9999999 --local-batch 1 {STEP} {PRICES}", "more than 2^53 samples"),
        (f"simulate --samples 1000 --epochs 99 --local-batch 1 {STEP} {PRICES}", "the trace is too short"),
        (f"compare {TASK} {STEP} --spot-price 1 --on-demand-workers 4", "such as --price 2.48, or leave --on-demand-w"),
        (f"compare {TASK} {STEP} --spot-price 1 --on-demand-step-time 1s", "--on-demand-step-time is for an on-demand"),
        (f"{WHATIF} --local-batch 10 --budget 5 --price 1", "--price is for the on-demand cluster that simulate and"),
        (f"{WHATIF} --local-batch 10 --budget 5 --price 0", "--price is for the on-demand cluster that simulate and"),
        (f"{WHATIF} --local-batch 10 --budget 5 --on-demand-workers 4", "--on-demand-workers is for the on-demand"),
        (f"{WHATIF} --local-batch 10 --budget 5 --on-demand-step-time 1s", "--on-demand-step-time is for the on"),
        (f"{WHATIF} --local-batch 10", "give a deadline"),
        (f"{WHATIF} --local-batch 10 --deadline 5", "has no unit"),
        (f"{WHATIF} --local-batch 10 --budget -5", "cannot be met"),
        (f"{WHATIF} --local-batch ten --budget 5", "is not a number or a range"),
        (f"{WHATIF} --local-batch 1:999999999 --budget 5", "has more than 1,000,000 values"),
        (f"{WHATIF} --local-batch 1:2000 --max-workers 1:2000 --budget 5", "settings are too many"),
    ],
)  # fmt: skip
def test_bad_input_is_reported_without_a_traceback(ebbflow: Ebbflow, text: str, message: str) -> None:
    answer = ebbflow(text, FLEET)
    assert answer.code == 2, answer
    assert message in answer.err
    assert "Traceback" not in answer.err
    assert answer.out == ""


def test_profile_measures_a_workload_and_simulate_reads_it(ebbflow: Ebbflow, tmp_path: Path) -> None:
    answer = ebbflow("profile digits-mlp --local-batch 16,64 --steps 5 --out p.json --json")
    assert answer.code == 0, answer.err
    found = json.loads(answer.out)
    assert found == json.loads((tmp_path / "p.json").read_text())
    assert [(one["workers"], one["samples"]) for one in found["measured"]] == [(1, 16), (1, 64)]
    assert found["per_step_s"] + found["per_sample_s"] > 0
    simulated = ebbflow(f"simulate {TASK} {PRICES} --profile p.json --emulated --repeat --json", FLEET)
    assert json.loads(simulated.out)["time_s"] > 0


def test_a_profile_without_a_rule_has_that_of_a_training_and_says_so_once(
    ebbflow: Ebbflow, caplog: pytest.LogCaptureFixture
) -> None:
    """One worker has one micro-batch, in which nothing is measured; two workers have the default of SGD."""
    assert ebbflow("profile digits-mlp --local-batch 16,32 --steps 2 --workers 1,2 --json").code == 0
    assert caplog.text.count("no rule was named: sqrt+statewarmup(0.05, by=multiplier)") == 1
    named = ebbflow("profile digits-mlp --local-batch 16 --steps 2 --rule adascale --json")
    assert named.code == 2
    assert "takes steps of two micro-batches or more" in named.err.replace("\n", " ")


def test_a_profile_of_emulated_workers_does_not_price_a_fleet(ebbflow: Ebbflow, tmp_path: Path) -> None:
    profile = {"per_update_s": 0, "per_step_s": 0.01, "per_sample_s": 0.001, "network": None, "piece": None,
               "serial": True}  # fmt: skip
    (tmp_path / "p.json").write_text(json.dumps(profile))
    refused = ebbflow(f"simulate {TASK} {PRICES} --profile p.json --json", FLEET)
    assert refused.code == 2
    assert "p.json is of emulated workers: one machine computed for all of them" in refused.err
    assert ebbflow(f"simulate {TASK} {PRICES} --profile p.json --emulated --json", FLEET).code == 0
    assert ebbflow(f"simulate {TASK} {PRICES} --profile p.json --json", "constant(1)").code == 0
    assert ebbflow(f"simulate {TASK} {PRICES} --profile p.json --max-workers 1 --json", FLEET).code == 0
    settings = ScenarioSettings(samples=1000, epochs=1, local_batch=10, profile=tmp_path / "p.json",
                                spot_price="1", emulated=True)  # fmt: skip
    assert simulate(settings.scenario(FLEET)).time_s > 0


def test_whatif_refuses_one_step_time_for_several_local_batches(ebbflow: Ebbflow) -> None:
    refused = ebbflow(f"{WHATIF} --deadline 300s --local-batch 16,32", "0s:8 10h")
    assert refused.code == 2
    assert "the larger batch would cost nothing" in refused.err
    assert "--compute-sample" in refused.err
    priced = WHATIF.replace("--step-time 1s", "--compute-step 100ms --compute-sample 10ms")
    assert ebbflow(f"{priced} --deadline 300s --local-batch 16,32", "0s:8 10h").code == 0


def test_whatif_and_simulate_agree_on_a_beginning_that_the_trace_is_too_short_for(ebbflow: Ebbflow) -> None:
    text = f"{WHATIF} --deadline 300s --local-batch 10"  # 100 s on eight workers
    answer = ebbflow(text, "0s:8 160s")
    assert "no end: the trace or its prices end before; --repeat begins the trace again" in answer.out
    begun = {
        one["name"]: one["time_s"] for one in json.loads(ebbflow(f"{text} --json", "0s:8 160s").out)["sensitivity"]
    }
    assert begun["begun 80.0 s into the trace"] is None
    simulated = WHATIF.replace("whatif", "simulate") + " --price 1 --local-batch 10 --offset 80s"
    assert ebbflow(simulated, "0s:8 160s").code == 2
    assert ebbflow(f"{simulated} --repeat", "0s:8 160s").code == 0


def test_profile_fits_the_steps_of_a_record(ebbflow: Ebbflow) -> None:
    trained = ebbflow(
        "train digits-mlp --epochs 1 --local-batch 32 --out run --json --trace", "square(1, 4, period=8s)"
    )
    assert trained.code == 0, trained.err
    found = json.loads(ebbflow("profile --from run --json").out)
    assert found["serial"] is True  # the engine computed for all workers
    assert {one["workers"] for one in found["measured"]} == {1, 4}
    neither = ebbflow("profile")
    assert neither.code == 2
    assert "give a workload to measure, or a record" in neither.err
    for wrong, message in (
        ("profile --from run --local-batch 32", "--local-batch is for measuring, and a record is read (--from)"),
        ("profile --from run --steps 40", "--steps is for measuring"),
        ("profile digits-mlp --emulated", "--emulated is for a record (--from), and a workload is measured"),
    ):
        refused = ebbflow(wrong)
        assert refused.code == 2
        assert message in refused.err


def test_profile_of_a_live_job_fits_all_replicas_and_measures_what_changes_cost(
    ebbflow: Ebbflow, tmp_path: Path
) -> None:
    # Steps of 1 s on one replica and 1.5 s on two. The second comes before step 3, which begins 0.25 s later than
    # usual, and is lost before step 6, which begins 0.75 s later than usual.
    def row(step: int, start: float, end: float, workers: int) -> dict[str, object]:
        return {
            "kind": "step", "step": step, "time_s": start, "wall_s": end, "epoch": 0, "samples": 8 * (step + 1),
            "workers": workers, "batch": 8, "pieces": workers, "lr_base": 1, "lr": 1, "multiplier": 1, "loss": 1,
            "stats": {"lineage": step + 1, "parent": step},
        }  # fmt: skip

    first = [row(0, 0, 1, 1), row(1, 1, 2, 1), row(2, 2, 3, 1), row(3, 3.25, 4.75, 2), row(4, 4.75, 6.25, 2),
             row(5, 6.25, 7.75, 2), row(6, 8.5, 9.5, 1), row(7, 9.5, 10.5, 1)]  # fmt: skip
    header = {"kind": "header", "version": 2, "config": {"epoch_samples": 80}}
    for name, rows in (("r0", first), ("r1", first[3:6])):
        (tmp_path / "job" / "replicas" / name).mkdir(parents=True)
        lines = [json.dumps(line) for line in (header, *rows)]
        (tmp_path / "job" / "replicas" / name / "record.jsonl").write_text("\n".join(lines) + "\n")
    answer = ebbflow("profile --from job --json")
    assert answer.code == 0, answer.err
    found = json.loads(answer.out)
    assert found["recovery"] == "step(0.75s, join=0.25s)"
    assert found["serial"] is False
    # Without the steps that include the gain and the loss: three on one replica, and two on two in both records.
    measured = {one["workers"]: (one["seconds"], one["steps"]) for one in found["measured"]}
    assert measured == {1: (pytest.approx(1.0), 3), 2: (pytest.approx(1.5), 4)}
    assert '--recovery "step(0.75s, join=0.25s)"' in ebbflow("profile --from job").out


def test_growing_policies_are_simulated_compared_and_searched(ebbflow: Ebbflow) -> None:
    # 500 samples in steps of 20 s are 25 steps; then steps of 40 on four workers, for 500 samples: 13 steps.
    grown = ebbflow(f"simulate {STEP} {PRICES} --samples 500 --epochs 2 --local-batch 10 --ref-batch 20 --json "
                    "--policy geo(1ep)", "constant(4)")  # fmt: skip
    assert grown.code == 0, grown.err
    assert (json.loads(grown.out)["steps"], json.loads(grown.out)["time_s"]) == (38, 38.0)
    both = ebbflow(f"compare {STEP} --spot-price 1 --samples 500 --epochs 2 --local-batch 10 --json --policy follow "
                   "--policy geo(1ep,initial=20)", "constant(4)")  # fmt: skip
    assert [one["steps"] for one in json.loads(both.out)] == [26, 38]
    tried = ebbflow(f"whatif {STEP} --spot-price 1 --samples 500 --epochs 2 --local-batch 10 --json --deadline 1h "
                    "--max-workers 2,4 --policy geo(1ep,initial=20)", "constant(4)")  # fmt: skip
    # Two workers do steps of 20 only: 50 s of two, against 38 s of four.
    assert (json.loads(tried.out)["time_s"], json.loads(tried.out)["setting"]["max_workers"]) == (50.0, 2)


@pytest.mark.parametrize("verb", ["simulate", "compare", "whatif --deadline 1h"])
def test_a_reference_batch_on_which_nothing_depends_is_refused(ebbflow: Ebbflow, verb: str) -> None:
    task = f"{STEP} --spot-price 3.6 --samples 500 --epochs 2 --local-batch 10 --ref-batch 20"
    task += " --price 36" if verb == "simulate" else ""
    ebbflow(f"{verb} {task}", FLEET).assert_refused("--ref-batch 20 would change nothing", "add --noise-scale or a gr")
    assert ebbflow(f"{verb} {task} --noise-scale 100", FLEET).code == 0
    assert ebbflow(f"{verb} {task} --policy geo(1ep)", FLEET).code == 0


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("noise", "grows by what training shows (losses, gradients), which a simulation does not have"),
        ("goodput", "follows the noise scale, which a simulation does not measure"),
        ("geo(1ep)", "begins with the reference batch; give it (--ref-batch), or initial="),
    ],
)
def test_growing_policies_that_cannot_be_simulated_say_why(ebbflow: Ebbflow, policy: str, message: str) -> None:
    answer = ebbflow(f"simulate {TASK} {STEP} {PRICES} --policy {policy}", FLEET)
    assert answer.code == 2
    assert message in " ".join(answer.err.split())
