"""Across all verbs, one idea has one name, and one name stands for one idea."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import typer

from ebbflow.cli import common
from ebbflow.cli.main import app
from ebbflow.run.config import RunConfig

SETTINGS = {"--plugin" if name == "plugins" else f"--{name.replace('_', '-')}" for name in RunConfig.model_fields}
"""Options that are generated from the settings of a run, each of which has a name and a meaning there."""
IDEAS = {
    # What is trained, and how
    "--samples": "samples per epoch",
    "--seeds": "number of seeds",
    "--noise-scale": "noise scale of the training",
    # On what it is computed
    "--emulated": "one machine computes for all workers",
    "--jobs": "runs at the same time",
    "--only": "a part of the runs of a study",
    "--gpus": "GPUs per replica",
    # Workers over time
    "--format": "format of a trace file",
    "--start": "begin of the part of a trace",
    "--stop": "end of the part of a trace",
    "--max-workers": "largest number of workers",
    "--workers": "numbers of workers to measure",
    "--across-epochs": "whether steps run across the ends of epochs",
    "--recovery": "what a change of the fleet costs",
    "--provisioning": "time from arrival to the first step",
    "--stragglers": "model of slow workers",
    # How long a step takes
    "--profile": "measured step model",
    "--compute-step": "computing time per step",
    "--compute-sample": "computing time per sample",
    "--network": "model of the network",
    "--overlap": "part of the network time that is hidden",
    "--loading": "time to read a sample",
    "--steps": "steps to measure",
    "--from": "record to fit",
    # Money
    "--spot-price": "price of a worker of the trace",
    "--price-history": "prices over time",
    "--price-offset": "time in the prices at which training begins",
    "--zone": "zone of the prices",
    "--minimum-billing": "time that is billed at least",
    "--price": "price of a worker on demand",
    "--on-demand-workers": "size of the on-demand cluster",
    "--on-demand-step-time": "step time of the on-demand cluster",
    "--deadline": "latest end",
    "--budget": "highest cost, in USD or as a time",
    # Fleets
    "--replicas": "number of replicas",
    "--min-replicas": "fewest replicas that train",
    "--join": "lighthouse of a fleet elsewhere",
    "--name": "name of a replica",
    "--job": "name of a job",
    "--bind": "address to listen on",
    "--address-file": "file of the lighthouse's address",
    "--heartbeat-timeout": "when a replica is dead",
    "--join-timeout": "how long a late replica is waited for",
    "--grace": "time to leave",
    "--max-failures": "deaths until a replica is given up",
    "--speed": "speed of a replay",
    "--signal": "how replicas are ended",
    "--leaver": "which replica is ended",
    "--duration": "real time after which a replay stops",
    "--finish": "whether a replay ends with the job",
    "--ranks-per-replica": "processes of a replica",
    "--transport": "what carries the gradients of GPUs",
    "--notice": "who announces that a machine is taken away",
    "--checkpoints": "where checkpoints are kept",
    "--serve": "whether the page of a job is served",
    "--port": "port of a page",
    # Studies
    "--scale": "size of a study relative to the published one",
    "--stand-in": "data in the place of the published one",
    "--set": "a setting for every run of a study",
    "--keep-weights": "whether final weights are kept",
    "--list": "list what there is",
    "--show": "print a recipe",
    "--target": "score to reach",
    "--rates": "factors of the base rate to compare",
    "--choice": "result of a tournament",
    # What all verbs share
    "--allow-code-change": "whether a run continues with other code",
    "--allow-changes": "whether a fleet continues with other settings of its script",
    "--from-scratch": "whether earlier files are moved aside",
    "--out": "where results are written",
    "--checkpoint-every": "time between checkpoints",
    "--json": "answer as JSON",
    "--open": "open a page in the browser",
    "--width": "columns of a drawing",
    "--version": "version",
}
"""All other options. A new one is one more row, unless its idea is here, or among the settings, under another name."""

WITHOUT_JSON = {
    "trace show": "draws", "trace convert": "writes a file", "trace make": "writes a file", "rules show": "draws",
    "rules cards": "writes files", "lighthouse": "a server", "replica": "a program of a fleet",
}  # fmt: skip
"""Verbs that print no results."""
WITHOUT_PLUGIN = {
    "demo": "a fixed study", "doctor": "looks at this machine", "status": "asks a fleet", "lighthouse": "a server",
}  # fmt: skip
"""Verbs that take no trace, rule, policy, price, workload or optimizer."""


def verbs(command: Any = None, path: str = "") -> Iterator[tuple[str, Any]]:
    command = command or typer.main.get_command(app)
    if command.callback is not None and (path == "rules" or not hasattr(command, "commands")):
        yield path, command
    for name, below in getattr(command, "commands", {}).items():
        yield from verbs(below, f"{path} {name}".strip())


def options(command: Any) -> dict[str, Any]:
    found = {name: p for p in command.params if p.param_type_name == "option" for name in p.opts}
    return {name: p for name, p in found.items() if name not in ("--help", "-h")}


VERBS = dict(verbs())


def test_all_verbs_are_found() -> None:
    assert {"train", "study", "simulate", "launch", "replica", "trace convert", "rules", "rules show"} <= set(VERBS)


def test_every_option_has_an_idea_of_its_own() -> None:
    found = {name for command in VERBS.values() for name in options(command)} | {"--version"}
    assert found - SETTINGS == set(IDEAS)
    assert [idea for idea, count in Counter(IDEAS.values()).items() if count > 1] == []


def test_every_setting_of_a_run_is_an_option_of_train_with_its_documentation() -> None:
    shown = options(VERBS["train"])
    for name, field in RunConfig.model_fields.items():
        assert field.description, f"{name} is documented where it is declared"
        if name not in ("workload", "label"):  # an argument, and a name that a study gives
            option = "--plugin" if name == "plugins" else f"--{name.replace('_', '-')}"
            assert shown[option].help.startswith(field.description)


def test_every_verb_that_prints_results_can_answer_with_json() -> None:
    without = {verb for verb, command in VERBS.items() if "--json" not in options(command)}
    assert without == set(WITHOUT_JSON)


def test_every_verb_that_can_use_an_extension_takes_plugins() -> None:
    without = {verb for verb, command in VERBS.items() if "--plugin" not in options(command)}
    assert without == set(WITHOUT_PLUGIN)


@pytest.mark.parametrize("name", ["--plugin", "--json"])
def test_what_means_the_same_in_all_verbs_is_described_in_the_same_words(name: str) -> None:
    texts = {options(command)[name].help for command in VERBS.values() if name in options(command)}
    assert len(texts) == 1


def test_a_trace_argument_is_declared_once() -> None:
    traces = [p for command in VERBS.values() for p in command.params if p.metavar == "TRACE"]
    assert len(traces) >= 7
    assert {p.help for p in traces} == {common.TRACE.help}
