"""The options that simulate, compare and whatif share, and the scenario that they describe."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from ebbflow.cli.common import PluginFiles, command_line, err
from ebbflow.cli.trace import FormatName
from ebbflow.core.units import parse_seconds
from ebbflow.errors import ConfigError
from ebbflow.plan.policies import POLICIES, make_policy
from ebbflow.run.config import load_plugins
from ebbflow.simulate.efficiency import read_noise_scale
from ebbflow.simulate.fit import read_profile
from ebbflow.simulate.network import NETWORKS
from ebbflow.simulate.prices import Price, make_price, read_prices
from ebbflow.simulate.recovery import RECOVERIES
from ebbflow.simulate.scenario import Scenario
from ebbflow.simulate.simulate import Simulation, on_demand
from ebbflow.simulate.stepmodel import ComputeAndNetwork, StepModel, parse_step_time
from ebbflow.simulate.stragglers import STRAGGLERS
from ebbflow.traces import load

__all__ = ["OutFolder", "ScenarioOptions", "takes_scenario", "write_page"]

OutFolder = Annotated[Path | None, typer.Option("--out", help="Write a page with figures into this folder.")]

STEP, FLEET, MONEY, TASK = "How long a step takes", "The fleet", "Money", "The training"


def _option(panel: str, help: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, **more)


@dataclass(frozen=True, kw_only=True)
class ScenarioOptions:
    """What the user gave, still as text; each field is an option of the command line."""

    samples: Annotated[int, _option(TASK, "Samples of an epoch.", min=1)]
    epochs: Annotated[int, _option(TASK, "Epochs to train.", min=1)]
    local_batch: Annotated[int | None, _option(TASK, "Samples a worker takes in a step.", min=1)] = None
    policy: Annotated[str, _option(TASK, f"How the batch follows the workers: {', '.join(POLICIES.names())}.")] = (
        "follow"
    )
    noise_scale: Annotated[
        str | None, _option(TASK, "Noise scale in samples, or a record to take it from: time and cost to accuracy.")
    ] = None
    ref_batch: Annotated[
        int | None, _option(TASK, "Batch at which the epochs would do, and that growing policies begin with.")
    ] = None
    across_epochs: Annotated[
        bool, _option(TASK, "Let steps run across epoch ends instead of cutting them there.", "--across-epochs")
    ] = False

    step_time: Annotated[
        str | None, _option(STEP, "A measured time such as 0.6s, or a table by workers: '1:0.5s 8:0.62s'.")
    ] = None
    profile: Annotated[Path | None, _option(STEP, "A step model that ebbflow profile wrote.")] = None
    compute_step: Annotated[str | None, _option(STEP, "Computing a step, whatever its samples, such as 20ms.")] = None
    compute_sample: Annotated[str | None, _option(STEP, "Computing a sample of a worker, such as 4.5ms.")] = None
    network: Annotated[
        str | None, _option(STEP, f"{', '.join(NETWORKS.names())}: ring(megabytes=102, gbps=25, latency=50us).")
    ] = None
    overlap: Annotated[float, _option(STEP, "Share of the computing that hides the network, 0 to 1.")] = 0.0
    loading: Annotated[str, _option(STEP, "Reading a sample, in the background.")] = "0s"
    micro_batch: Annotated[
        int | None, _option(STEP, "Samples that fit into a worker at once; more are accumulated.")
    ] = None
    emulated: Annotated[bool, _option(STEP, "One machine computes for all workers.", "--emulated")] = False
    stragglers: Annotated[
        str | None, _option(STEP, f"{', '.join(STRAGGLERS.names())}: lognormal(0.1), rare(0.01, factor=3).")
    ] = None

    recovery: Annotated[
        str, _option(FLEET, f"What a change costs: {', '.join(RECOVERIES.names())}, such as step(detect=1s).")
    ] = "ideal"
    offset: Annotated[str, _option(FLEET, "Begin at this time of the trace, such as 30min.")] = "0s"
    repeat: Annotated[bool, _option(FLEET, "Repeat the trace until the training is done.", "--repeat")] = False
    max_workers: Annotated[int | None, _option(FLEET, "Rent no more than so many.", min=1)] = None
    provisioning: Annotated[str, _option(FLEET, "From a worker's arrival, when it is paid, to its first step.")] = "0s"
    format: FormatName = None
    plugin: PluginFiles = None

    spot_price: Annotated[
        str | None, _option(MONEY, "USD per hour of one worker of the trace, or a price model of a plugin.")
    ] = None
    price_history: Annotated[
        Path | None, _option(MONEY, "Prices over time instead: a file time_s,zone,usd_per_hour.")
    ] = None
    zone: Annotated[str | None, _option(MONEY, "Take the prices of one zone; without: the mean of all.")] = None
    price_offset: Annotated[str, _option(MONEY, "Where in the price history training begins.")] = "0s"
    minimum_billing: Annotated[str, _option(MONEY, "A worker is billed for at least so long, such as 60s.")] = "0s"
    price: Annotated[float | None, _option(MONEY, "USD an hour for a worker on demand.")] = None
    on_demand_workers: Annotated[
        int | None,
        _option(MONEY, "Size of the on-demand cluster; by default as many as the trace had on average.", min=1),
    ] = None
    on_demand_step_time: Annotated[
        str | None, _option(MONEY, "Step time of the on-demand cluster, where it differs.")
    ] = None

    # -- what they mean --------------------------------------------------------------------------------------------

    def scenario(self, trace: str, **changed: Any) -> Scenario:
        """The scenario on a trace; `changed` replaces options by name."""
        options = dataclasses.replace(self, **changed)
        if options.noise_scale is not None and options.ref_batch is None:
            raise ConfigError("--noise-scale needs --ref-batch: the batch at which the epochs asked for would do")
        return Scenario(
            trace=load(trace, format=options.format),
            policy=make_policy(options.policy, options.local_batch),
            model=options.model(),
            samples=options.samples,
            epochs=options.epochs,
            price=options.spot(),
            recovery=RECOVERIES.make(options.recovery),
            stragglers=None if options.stragglers is None else STRAGGLERS.make(options.stragglers),
            offset=parse_seconds(options.offset),
            repeat=options.repeat,
            max_workers=options.max_workers,
            provisioning=parse_seconds(options.provisioning),
            minimum_billing=parse_seconds(options.minimum_billing),
            cut=not options.across_epochs,
            noise_scale=float("inf") if options.noise_scale is None else read_noise_scale(options.noise_scale),
            ref_batch=options.ref_batch,
        )

    def model(self) -> StepModel:
        """The step model: measured as a whole, or computing and network."""
        parts = [self.compute_step, self.compute_sample]
        given = [self.step_time is not None, self.profile is not None, any(parts)]
        if sum(given) != 1:
            raise ConfigError(
                "say how long a step takes in one way: --step-time 0.6s, --profile FILE (ebbflow profile writes it) "
                "or --compute-step and --compute-sample"
            )
        if self.step_time is not None:
            parts_of_it = {
                "--network": self.network is not None,
                "--overlap": self.overlap != 0,
                "--loading": self.loading != "0s",
                "--micro-batch": self.micro_batch is not None,
                "--emulated": self.emulated,
            }
            if any(parts_of_it.values()):
                found = " and ".join(name for name, is_given in parts_of_it.items() if is_given)
                raise ConfigError(
                    f"--step-time is the time of the whole step; {found} would change nothing. Leave it out, or give "
                    f"--profile or --compute-sample instead of --step-time"
                )
            return parse_step_time(self.step_time)
        if self.profile is not None:
            base = read_profile(self.profile)
        else:
            base = ComputeAndNetwork(
                per_step=parse_seconds(self.compute_step or "0s"), per_sample=parse_seconds(self.compute_sample or "0s")
            )
        return dataclasses.replace(
            base,
            network=base.network if self.network is None else NETWORKS.make(self.network),
            overlap=self.overlap,
            loading=parse_seconds(self.loading),
            micro_batch=base.micro_batch if self.micro_batch is None else self.micro_batch,
            serial=base.serial or self.emulated,
        )

    def spot(self) -> Price:
        """The price of a worker of the trace."""
        if (self.spot_price is None) == (self.price_history is None):
            raise ConfigError("give the price of a worker: --spot-price 0.744 (USD per hour) or --price-history FILE, "
                              "one of the two; --spot-price 0 if money does not matter")  # fmt: skip
        if self.price_history is not None:
            return read_prices(self.price_history, zone=self.zone, offset=parse_seconds(self.price_offset))
        assert self.spot_price is not None
        return make_price(self.spot_price)

    def beside(self, found: Simulation) -> Simulation:
        """The same training on the on-demand cluster."""
        if self.price is None:
            raise ConfigError("give the on-demand price of a worker to compare with: --price 2.48 (USD per hour)")
        workers = self.on_demand_workers or max(1, int(found.mean_workers + 0.5))
        model = None if self.on_demand_step_time is None else parse_step_time(self.on_demand_step_time)
        return on_demand(found.scenario, workers=workers, usd_per_hour=self.price, model=model)


def write_page(found: Mapping[str, Simulation], *, folder: Path | None, name: str) -> None:
    """The page of the simulations, if a folder is given."""
    if folder is not None:
        # Imported here: matplotlib and jinja2 take a while that other answers need not wait for.
        from ebbflow.report.simulation import write_simulations

        page = write_simulations(found, out=folder, name=name, command=command_line())
        err.print(f"page: {page}", markup=False, soft_wrap=True)


def takes_scenario(verb: Callable[..., None]) -> Callable[..., None]:
    """A verb whose first argument is a `ScenarioOptions`, as a command with all its options.

    Options that the verb declares itself, under the same name, replace the shared ones.
    """
    own = list(inspect.signature(verb).parameters.values())[1:]
    own_hints = typing.get_type_hints(verb, include_extras=True)
    shared_hints = typing.get_type_hints(ScenarioOptions, include_extras=True)
    names = {parameter.name for parameter in own}
    fields = [field for field in dataclasses.fields(ScenarioOptions) if field.name not in names]
    parameters = [parameter.replace(annotation=own_hints[parameter.name]) for parameter in own]
    parameters += [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default,
            annotation=shared_hints[field.name],
        )
        for field in fields
    ]

    @functools.wraps(verb)
    def command(**given: Any) -> None:
        options = ScenarioOptions(**{field.name: given.pop(field.name) for field in fields})
        load_plugins(options.plugin or [])
        verb(options, **given)

    command.__signature__ = inspect.Signature([p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters])  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command
