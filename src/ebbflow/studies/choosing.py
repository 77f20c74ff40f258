"""`choose`: which rule and base rate suit a model on a fleet; what is compared, and for which runs.

`tournament.py` compares the candidates. A model of a user's own script takes part through `Session`.
"""

from __future__ import annotations

import math
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ebbflow._version import __version__
from ebbflow.core.plugins import load_plugins
from ebbflow.core.units import parse_seconds
from ebbflow.core.wording import called
from ebbflow.errors import ConfigError, UnitError
from ebbflow.rules.families import candidate_rules, name_of_optimizer, optimizer_family
from ebbflow.run.config import RunConfig, other_arguments
from ebbflow.studies.grid import Study, check_arms
from ebbflow.studies.halving import Candidate
from ebbflow.studies.runner import available_cores, default_jobs
from ebbflow.studies.tournament import ChooseProgress, Chosen, Tournament, TrainArm, rate_label, rounded_rate
from ebbflow.traces import load as load_trace

__all__ = ["RATES", "choose", "parse_budget"]

RATES = (1.0, 4.0, 0.25)
"""Factors of the base rate, the preferred one first."""
_AXES = ("workload", "trace", "rule", "seed", "label")

Made = Callable[[], Mapping[str, Any]]
"""A function that returns the arguments of a Session."""


def parse_budget(text: str, *, device: str) -> tuple[float | None, float | None]:
    """A budget as seconds of wall-clock time, or as a share of training every candidate to its end.

    All arms share one GPU, so that half a GPU-hour is half an hour.

    >>> parse_budget("30min", device="cpu"), parse_budget("0.5gpuh", device="cuda"), parse_budget("20%", device="cpu")
    ((1800.0, None), (1800.0, None), (None, 0.2))
    """
    number = text.strip().removesuffix("gpuh").removesuffix("%")
    unit = text.strip()[len(number) :]
    if unit == "gpuh" and not device.startswith("cuda"):
        raise ConfigError(
            f"the budget is {text}, but the device is {device}; give a time, or {called('device', 'cuda')}"
        )
    try:
        found = float(number) / 100 if unit == "%" else parse_seconds(f"{number}h" if unit else text)
    except (UnitError, ValueError):
        raise UnitError(f"the budget is {text!r}; expected a time (30min, 2h, 0.5gpuh) or a share (20%)") from None
    if not (math.isfinite(found) and found > 0):
        raise ConfigError(f"the budget is {text}; expected a time or a share above 0, such as 30min or 20%")
    return (None, found) if unit == "%" else (found, None)


def choose(
    workload: str | Made,
    *,
    trace: str | Path,
    budget: str,
    rules: Sequence[str] = (),
    rates: Sequence[float] = RATES,
    seeds: int = 3,
    out: Path | str | None = None,
    jobs: int | None = None,
    metric: str = "accuracy",
    higher_is_better: bool = True,
    command: str = "",
    on_progress: Callable[[ChooseProgress], None] = lambda progress: None,
    **settings: Any,
) -> Chosen:
    """Find the rule and the base rate that suit a model on a trace, within a budget; writes `choice.toml` and a page.

    Candidates are all `rules` (by default those that suit the optimizer) with all `rates` (factors of the base rate).
    They are compared by their last validation in runs of 5, 15 and 45 % of the epochs, whose schedules are complete:
    compressed, not cut off. The best third of each rung goes on. Where noise could decide who does, further seeds are
    run first, up to `seeds`. It takes at most the `budget`: wall-clock time ("30min", "0.5gpuh"), or a share of what
    training every candidate to its end would take, counted in epochs ("20%"), whose plan is the same on any machine.
    The answer says what more would give. Interrupted or killed, the same call continues; with a larger budget it goes
    on where the smaller one ended.

    `workload`: the name of a workload, also of a plugin (`plugins=[...]`); or a function without arguments that returns
    the arguments of a `Session` as a dict: model, optimizer, data, loss, evaluate. It is called once here and once in
    the process of each run, after torch was seeded, so it must be at the top level of a module, and a script that calls
    `choose` needs `if __name__ == "__main__":`. `metric` and `higher_is_better` are for such a function only: which
    entry of what `evaluate` returns is compared. `settings` are those of a run (`RunConfig`; for a function those of a
    Session, with `base_batch`): epochs, local_batch, schedule, device, ...
    """
    began = time.monotonic()
    if settings.get("plan") is not None:
        raise ConfigError(f"the plan {settings['plan']} counts steps and cannot be shortened; give a trace instead")
    if callable(workload):
        config, own_optimizer, train = _own_model(workload, trace, settings)
    else:
        given = {"workload": workload, "trace": trace, **settings}
        config = RunConfig.for_front_end("command", given, beside=other_arguments(choose, "command"))
        metric, own_optimizer, train = "", None, None
    budget_s, share = parse_budget(budget, device=config.device)
    load_plugins(config.plugins)
    from ebbflow.optim.optimizers import name_of_text
    from ebbflow.run.assemble import default_rule_of, engine_maker, resolve
    from ebbflow.run.planning import unmeasured_trace

    whole = resolve(config)
    assert whole.epochs and whole.lr and whole.optimizer
    optimizer = own_optimizer or whole.optimizer
    named = own_optimizer or name_of_text(whole.optimizer)
    family = optimizer_family(named)
    if not int(load_trace(config.trace).workers.max()):
        raise ConfigError(f"the trace {config.trace} has no workers at any time; give one with a worker or more")
    if jobs is not None and jobs < 1:
        raise ConfigError(f"jobs is {jobs}; expected the number of runs at once, 1 or more")
    if seeds < 1:
        raise ConfigError(f"seeds is {seeds}; expected the most runs of a candidate in a rung, 1 or more")
    base = float(whole.lr)
    candidates = _candidates(rules or candidate_rules(family, epochs=whole.epochs), rates)
    study = Study(
        name=f"choose {config.workload}",
        workloads=(config.workload,),
        rules=tuple(dict.fromkeys(one.rule for one in candidates)),
        traces={rate_label(rate): config.trace for rate in dict.fromkeys(one.rate for one in candidates)},
        seeds=(0,),
        settings=_settings(config, whole.epochs),
        override=tuple(
            {"trace": rate_label(rate), "set": {"lr": rounded_rate(base * rate)}}
            for rate in dict.fromkeys(one.rate for one in candidates)
        ),
        source="choose",
    )
    arms = study.arms()
    check_arms(arms)
    tournament = Tournament(
        study=study,
        candidates=candidates,
        epochs=whole.epochs,
        base=base,
        fallback=lambda why: default_rule_of(
            whole,
            named,
            engine=engine_maker(whole.engine),
            one_micro_batch=partial(unmeasured_trace, whole),
            unmeasured=why,
        ),
        folder=Path(out or Path("runs") / _folder_name(config)),
        budget_s=budget_s,
        share=share,
        jobs=jobs or default_jobs(arms, cores=available_cores()),
        most_seeds=seeds,
        metric=(metric, higher_is_better) if metric else None,
        train=train,
        command=command,
        on_progress=on_progress,
        began=began,
        source={
            "workload": config.workload,
            "trace": config.trace,
            "trace_sha256": config.trace_digest(),
            "optimizer": optimizer,
            "optimizer_family": family,
            "base_lr": base,
            "ref_batch": whole.ref_batch,
            "local_batch": whole.local_batch,
            "epochs": whole.epochs,
            "ebbflow": __version__,
        },
        identity={
            "settings": config.replace(rule=candidates[0].rule).fingerprint(),
            "workload": config.workload,
            "trace": config.trace,
            "candidates": [[one.rule, one.rate] for one in candidates],
        },
    )
    chosen = tournament.run()
    from ebbflow.report.choice_page import write_choice_page  # imports matplotlib and jinja2, which takes long

    write_choice_page(chosen.folder)
    return chosen


def _own_model(make: Made, trace: str | Path, settings: dict[str, Any]) -> tuple[RunConfig, str, TrainArm]:
    """What a tournament needs of a user's own model: settings, the name of the optimizer, and what trains an arm."""
    from torch.optim import Optimizer
    from torch.utils.data import DataLoader

    from ebbflow.optim.elastic import ElasticOptimizer
    from ebbflow.run.session import train_session
    from ebbflow.workloads import WORKLOADS, Recipe, register_workload

    try:
        pickle.dumps(make)
    except (pickle.PicklingError, AttributeError, TypeError):
        raise ConfigError(
            f"{make!r} cannot be sent to other processes; define the function at the top level of a module"
        ) from None
    made = make()
    missing = [name for name in ("model", "optimizer", "data", "loss", "evaluate") if name not in made]
    if missing:
        raise ConfigError(
            f"the function returned {', '.join(made) or 'nothing'}, and {', '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} missing; expected the arguments of a Session, as a dict"
        )
    optimizer, data = made["optimizer"], made["data"]
    if isinstance(optimizer, ElasticOptimizer) or not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"the optimizer is a {type(optimizer).__name__}; expected a plain optimizer of torch, since its rule is "
            f"what is to be chosen"
        )
    device = next(made["model"].parameters()).device
    if isinstance(data, DataLoader) and data.batch_size is not None:
        settings = {"local_batch": data.batch_size, **settings}
    name = f"{make.__module__.rpartition('.')[2].strip('_')}-{make.__name__}".replace("_", "-")
    config = RunConfig.for_front_end(
        "session", {"trace": trace, **settings}, beside=other_arguments(choose, "session"), workload=name,
        device=str(device), lr=rounded_rate(optimizer.param_groups[0]["lr"]),
    )  # fmt: skip
    for field_name, shown in (("epochs", "epochs"), ("ref_batch", "base_batch"), ("local_batch", "local_batch")):
        if getattr(config, field_name) is None:
            why = "complete runs are compared, and a run needs an end: " if field_name == "epochs" else ""
            raise ConfigError(f"{shown} is missing: {why}give {shown}=... to choose")
    if name not in WORKLOADS:

        def build() -> Any:
            raise ConfigError(f"{name} is the model of a script, and trained by a Session")

        # Nothing but the name is used: every setting of the recipe is given above, or has this value in a Session.
        recipe = Recipe(
            ref_batch=1, local_batch=1, lr=1.0, optimizer="sgd", schedule="constant", epochs=1, metric="loss"
        )
        register_workload(name, recipe=recipe)(build)
    return config, name_of_optimizer(type(optimizer)), partial(train_session, make)


def _candidates(rules: Sequence[str], rates: Sequence[float]) -> list[Candidate]:
    """All pairs, in the order of preference: all rules with the first rate, then with the second, ..."""
    for rate in rates:
        if not (math.isfinite(rate) and rate > 0):
            raise ConfigError(f"a rate is {rate:g}; expected a factor of the base rate above 0, such as 0.25")
    found = list(dict.fromkeys(Candidate(rule, float(rate)) for rate in rates for rule in rules))
    if len(found) < 2:
        raise ConfigError("there is one candidate only, and nothing to choose; give more rules or rates")
    return found


def _settings(config: RunConfig, epochs: int) -> dict[str, Any]:
    """The settings that are not at their defaults, for every run; a run is validated once, at its end."""
    given = {name: value for name, value in config if value != RunConfig.model_fields[name].default}
    kept = {name: value for name, value in given.items() if name not in (*_AXES, "lr", "plan")}
    return {"validate_every": epochs, "epochs": epochs, **kept}


def _folder_name(config: RunConfig) -> str:
    text = f"choose_{config.workload}_{Path(config.trace).stem if '/' in config.trace else config.trace}"
    return "".join(letter if letter.isalnum() or letter in "._+-" else "-" for letter in text)[:100].strip("-")
