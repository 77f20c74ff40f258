"""The tournament of `ebbflow choose`: runs what `halving.py` decides, and remembers it in its folder.

A rung is a study of its own below the folder (`rung-1`, `rung-2`, ...) whose arms are the candidates that are left, so
that `ebbflow report` reads it. `choose.json` holds what was begun, how long it took and, at the end, the answer. After
a kill the same call continues: arms that ended are found, arms that were under way go on from their checkpoints, and a
rung that another one followed is not decided again.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ebbflow.core.choices import Choice, write_choice
from ebbflow.core.files import hold_lock, write_whole
from ebbflow.core.folders import check_folder
from ebbflow.core.units import format_seconds, plural
from ebbflow.core.wording import called
from ebbflow.errors import ConfigError, OutputError, RecordError
from ebbflow.record import Run, read_record
from ebbflow.studies.grid import Arm, Study
from ebbflow.studies.halving import (
    Candidate,
    Pace,
    Scores,
    fitting,
    in_doubt,
    ladder,
    ladder_seconds,
    measured_noise,
    rank,
    rung_epochs,
    rung_seconds,
    seed_adjusted,
)
from ebbflow.studies.runner import ArmProgress, run_study
from ebbflow.studies.scaling import scaled

__all__ = ["ChooseProgress", "Chosen", "Tournament", "TrainArm", "rate_label", "rounded_rate"]

VERSION = 1
"""Version of choose.json."""
_STATE, _CHOICE = "choose.json", "choice.toml"
_AT_THE_END = 0.04
"""Part of the budget that is left for ending the arms and writing the results."""
_SURE = 0.9
"""What is planned takes at most this part of the time that is left, since arms are not all equally fast."""
_SAVE_EVERY_S = 2.0

TrainArm = Callable[..., Run]
CandidateRun = tuple[Candidate, int]
"""A candidate and a seed."""


@dataclass(frozen=True, kw_only=True)
class ChooseProgress:
    """Where a tournament is, for showing it to the user."""

    rung: int
    rungs: int
    epochs: int
    """Epochs of every run of the rung."""
    done: float
    """Runs of the rung that have ended, and the parts of those under way."""
    arms: int
    leader: str
    """The best candidate of the rung so far, with its score; empty as long as no run has ended."""
    spent: str
    """How much of the budget is spent, in words."""
    message: str = ""
    """What the user should know at once."""


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """The result of a tournament."""

    choice: Choice
    answer: Mapping[str, Any]
    """Everything as JSON: choice, ranking with intervals, rungs, cost, candidates left out, what more budget gives."""
    folder: Path

    @property
    def path(self) -> Path:
        """The file of the choice, for `--choice` and `ElasticOptimizer.from_choice`."""
        return self.folder / _CHOICE

    @property
    def page(self) -> Path:
        """The HTML page."""
        return self.folder / "report" / "index.html"


def rate_label(rate: float) -> str:
    """What a rung calls a factor of the base rate; it stands in the place of a trace's name."""
    return f"rate x{rate:g}"


def rounded_rate(rate: float) -> float:
    """Six digits, since the rate is shown, written into a file and part of an arm's identity."""
    return float(f"{rate:.6g}")


@dataclass(frozen=True)
class _ArmScore:
    """What a record says about a run that ended."""

    score: float | None
    """The metric, oriented so that more is better; None if the run diverged."""
    samples: int
    wall_s: float


@dataclass(kw_only=True)
class Tournament:
    """The edge: runs what `halving.py` decides, reads the scores, and remembers it in choose.json."""

    study: Study
    candidates: list[Candidate]
    epochs: int
    base: float
    fallback: Callable[[str], tuple[str, str]]
    """The rule to use where nothing was decided, and what keeps it from being the best fixed one of the family; given
    why noise and signal cannot be measured, if that is known."""
    folder: Path
    budget_s: float | None
    """Wall-clock time in seconds; None: the share counts."""
    share: float | None
    """Epochs of all runs, as a part of training every candidate to its end; None: the time counts."""
    jobs: int
    most_seeds: int
    metric: tuple[str, bool] | None
    """Name, and whether more is better; None: as the records say."""
    train: TrainArm | None
    command: str
    on_progress: Callable[[ChooseProgress], None]
    began: float
    source: Mapping[str, Any]
    identity: Mapping[str, Any]
    begun: list[list[CandidateRun]] = field(default_factory=list)
    """For each rung the runs that were begun: a candidate and a seed."""
    ended: list[dict[CandidateRun, _ArmScore]] = field(default_factory=list)
    left_out: dict[Candidate, str] = field(default_factory=dict)
    timed: list[tuple[int, float, float]] = field(default_factory=list)
    more: list[str] = field(default_factory=list)
    """What a larger budget would give, in sentences."""
    _before_s: float = 0.0
    _preparing_s: float = 0.0
    """From the call of `choose` to the first run: importing torch, for the most part."""
    _first_step_s: float | None = None
    """What was spent when the first run reported a step."""
    _saved: float = 0.0
    _shown_metric: str = ""
    _higher_is_better: bool = True
    _fractions: dict[str, float] = field(default_factory=dict)

    # The tournament -----------------------------------------------------------------------------------------------

    def run(self) -> Chosen:
        """Continue where an earlier call ended, and end with the results in the folder."""
        check_folder(self.folder, "tournament")
        busy = f"another tournament is running in {self.folder}; wait for it or choose another folder"
        with hold_lock(self.folder / ".choose.lock", busy=busy):
            self._load()
            self._preparing_s = time.monotonic() - self.began
            lengths = rung_epochs(self.epochs)
            last = self._first_rung(lengths)
            while last is not None and last + 1 < len(lengths):
                following = self._next_rung(last, lengths)
                if following is None:
                    break
                last = following
            if last is not None:
                self._add_seeds(last, 1, lengths, after=())
            return self._write(last, lengths)

    def _first_rung(self, lengths: Sequence[int]) -> int | None:
        """Measure with as many candidates as run at once, then plan and run as many as fit; None: no run ended."""
        if len(self.begun) > 1:
            return 0 if self._train(0, lengths[0], []) else None
        self._train(0, lengths[0], [])
        while self.share is None and not self._scores(0) and not self._over and not self._too_late_to_begin:
            untried = self._untried()
            if not untried:
                break
            self._train(0, lengths[0], [(one, 0) for one in untried[: self.jobs]])
        while (self._scores(0) or self.share) and not self._over and (untried := self._untried()):
            done = len(self._scores(0))
            count, _ = fitting(done + len(untried), lengths, self._pace, self._turns, left_s=self._plannable, done=done)
            if count <= done:
                break
            self._train(0, lengths[0], [(one, 0) for one in untried[: count - done]])
        if not self._scores(0) and not self._untried() and self.left_out:
            raise ConfigError("no candidate can be trained: " + "; ".join(dict.fromkeys(self.left_out.values())))
        enough = len(self._scores(0)) > 1 or not self._untried()
        return 0 if enough and self._scores(0) else None

    def _next_rung(self, number: int, lengths: Sequence[int]) -> int | None:
        """Run seeds until it is clear who goes on, then the next rung; None if this rung is the last one."""
        following = number + 1
        if len(self.begun) > following:  # decided by an earlier call
            return following if self._train(following, lengths[following], []) else None
        scores = self._scores(number)
        sound = [one for one in rank(scores) if seed_adjusted(scores)[one] > -math.inf]
        if len(sound) < 2:
            return None
        counts = ladder(len(scores), 2)
        keep = next((k for k in range(min(counts[1], len(sound)), 1, -1) if self._fits([k], lengths[following:])), 0)
        if not keep or self._over:
            wanted = min(counts[1], len(sound))
            needed = rung_seconds(wanted, lengths[following], self._pace, self._turns)
            self.more.append(
                f"The next rung, {wanted} candidates for {lengths[following]} epochs, takes about "
                f"{self._amount(needed)} more."
            )
            return None
        rest = ladder(keep, len(lengths) - following)
        self._add_seeds(number, keep, lengths, after=rest)
        scores = self._scores(number)
        going = [one for one in rank(scores) if seed_adjusted(scores)[one] > -math.inf][:keep]
        if len(going) < 2 or self._over:
            return None
        if self._train(following, lengths[following], [(one, 0) for one in going]):
            return following
        self.more.append(
            f"The budget ended within rung {following + 1}, which therefore does not count; a larger one continues it."
        )
        return None

    def _add_seeds(self, number: int, keep: int, lengths: Sequence[int], *, after: Sequence[int]) -> None:
        """Run further seeds of the candidates that noise could put on the wrong side, while the rest still fits."""
        following = ladder_seconds(after, lengths[number + 1 :], self._pace, self._turns) if after else 0.0
        while doubtful := in_doubt(self._scores(number), keep, most_seeds=self.most_seeds):
            needed = rung_seconds(len(doubtful), lengths[number], self._pace, self._turns)
            names = ", ".join(str(one) for one in doubtful)
            if needed + following > self._plannable:
                self.more.append(
                    f"Noise could have decided rung {number + 1}; another seed of {names} takes about "
                    f"{self._amount(needed)} more."
                )
                return
            more = [(one, len(self._scores(number)[one])) for one in doubtful]
            if not self._train(number, lengths[number], more):
                self.more.append(
                    f"Noise could have decided rung {number + 1}; the budget ended while another seed of {names} was "
                    f"trained, and a larger one continues there."
                )
                return

    def _fits(self, counts: Sequence[int], lengths: Sequence[int]) -> bool:
        return ladder_seconds(counts, lengths, self._pace, self._turns) <= self._plannable

    def _untried(self) -> list[Candidate]:
        begun = {one for one, _ in self.begun[0]} if self.begun else set()
        return [one for one in self.candidates if one not in begun and one not in self.left_out]

    def _scores(self, number: int) -> Scores:
        """The scores of a rung; candidates whose first run has not ended, or that were left out, are not in it."""
        ended = self.ended[number] if number < len(self.ended) else {}
        found: dict[Candidate, dict[int, float | None]] = {}
        for candidate in self.candidates:
            runs = {seed: ended[one, seed].score for one, seed in sorted(ended) if one == candidate}
            if 0 in runs and candidate not in self.left_out:
                found[candidate] = runs
        return found

    # Time ---------------------------------------------------------------------------------------------------------

    @property
    def _spent_s(self) -> float:
        return self._before_s + time.monotonic() - self.began

    @property
    def _allowed(self) -> float:
        """The budget, in seconds or in epochs."""
        if self.share is not None:
            return self.share * len(self.candidates) * self.epochs
        assert self.budget_s is not None
        return self.budget_s

    @property
    def _spent(self) -> float:
        if self.share is not None:
            return self._epochs_done()
        return self._spent_s

    @property
    def _left(self) -> float:
        return self._allowed * (1 if self.share is not None else 1 - _AT_THE_END) - self._spent

    @property
    def _plannable(self) -> float:
        return self._left * (1 if self.share is not None else _SURE)

    @property
    def _over(self) -> bool:
        return self._left < 0

    @property
    def _too_late_to_begin(self) -> bool:
        """Whether not even the first run can begin: the process that runs are forked from imports torch as well."""
        return self.share is None and not any(self.begun) and self._left < self._preparing_s

    @property
    def _pace(self) -> Pace:
        """What an arm costs, in the unit of the budget: measured, or simply its epochs."""
        return Pace(start_s=0.0, epoch_s=1.0) if self.share is not None else Pace.measured(self.timed)

    @property
    def _turns(self) -> int:
        """How many arms share the cost of one."""
        return 1 if self.share is not None else self.jobs

    def _amount(self, cost: float) -> str:
        if self.share is None:
            return format_seconds(cost)
        return f"{cost:g} epochs ({cost / (len(self.candidates) * self.epochs):.0%})"

    def _epochs_done(self) -> int:
        return sum(length * len(rung) for length, rung in zip(rung_epochs(self.epochs), self.ended, strict=False))

    # Running ------------------------------------------------------------------------------------------------------

    def _train(self, number: int, epochs: int, more: Sequence[CandidateRun]) -> bool:
        """Run what was begun in a rung and `more`; returns whether all of it has ended."""
        while len(self.begun) <= number:
            self.begun.append([])
            self.ended.append({})
        self.begun[number] += [run for run in more if run not in self.begun[number]]
        self._save()
        wanted = [run for run in self.begun[number] if run[0] not in self.left_out]
        if not wanted:
            return True
        rung, arms = self._rung(wanted, epochs)
        out = self.folder / f"rung-{number + 1}"
        started: dict[str, float] = {}
        self._fractions = {}

        def on_arm(progress: ArmProgress) -> None:
            now = time.monotonic()
            self._fractions[progress.arm] = progress.fraction
            message = ""
            if progress.what == "started":
                started[progress.arm] = now
            elif progress.what == "moved" and self._first_step_s is None:
                self._first_step_s = self._spent_s
            elif progress.what in ("finished", "diverged", "found"):
                self._read(number, arms[progress.arm], out / "arms" / progress.arm)
                if progress.arm in started and (ended := self.ended[number].get(arms[progress.arm])):
                    self.timed.append((epochs, ended.wall_s, now - started[progress.arm]))
                self._save()
            elif progress.what == "failed" and not self._over:
                candidate, _ = arms[progress.arm]
                self.left_out[candidate] = progress.text
                message = f"{candidate} is left out: {progress.text}"
            if now - self._saved > _SAVE_EVERY_S:
                self._save()
            self._report(number, epochs, len(wanted), message)

        with _renamed_errors(self.folder):
            run_study(
                rung, out, jobs=self.jobs, command=self.command, on_progress=on_arm, should_stop=lambda: self._over,
                train=self.train,
            )  # fmt: skip
        for name, (candidate, _) in arms.items():
            if candidate in self.left_out and (out / "arms" / name).exists():
                # A study tries failed arms again, and refuses folders of arms that it does not have.
                (out / "failed").mkdir(exist_ok=True)
                (out / "arms" / name).rename(out / "failed" / name)
        self._save()
        return all(run in self.ended[number] for run in wanted if run[0] not in self.left_out)

    def _rung(self, runs: Sequence[CandidateRun], epochs: int) -> tuple[Study, dict[str, CandidateRun]]:
        """The study of a rung, and which run each of its arms is."""
        seeds = tuple(sorted({seed for _, seed in runs}))
        skip = tuple(
            {"rule": rule, "trace": trace, "seed": seed}
            for seed in seeds
            for trace in self.study.traces
            for rule in self.study.rules
            if not any((rate_label(one.rate), one.rule, s) == (trace, rule, seed) for one, s in runs)
        )
        whole = replace(self.study, seeds=seeds, skip=skip)
        rung = scaled(whole, epochs / self.epochs, same_models=True)
        rates = {rate_label(one.rate): one.rate for one in self.candidates}

        def run_of(arm: Arm) -> CandidateRun:
            assert arm.config.rule is not None  # a study names its rules
            return Candidate(arm.config.rule, rates[arm.config.label]), arm.config.seed

        return rung, {new.id: run_of(old) for old, new in zip(whole.arms(), rung.arms(), strict=True)}

    def _read(self, number: int, run: CandidateRun, folder: Path) -> None:
        """Take the score of a run from its record."""
        record = read_record(folder / "record.jsonl")
        config = record.header.config
        name, higher = self.metric or (str(config["metric"]), bool(config["higher_is_better"]))
        self._shown_metric, self._higher_is_better = name, higher
        metrics = record.validations[-1].metrics if record.validations else {}
        value = metrics.get(name) if record.status == "finished" else None
        if record.status == "finished" and name not in metrics:
            raise ConfigError(f"the metric is {name!r}, but the scores are {', '.join(sorted(metrics)) or 'none'}")
        score = None if value is None or not math.isfinite(value) else value if higher else -value
        end = record.end
        self.ended[number][run] = _ArmScore(
            score=score, samples=end.samples - record.dropped if end else 0, wall_s=end.wall_s if end else 0.0
        )

    def _report(self, number: int, epochs: int, arms: int, message: str) -> None:
        scores = self._scores(number)
        leader = ""
        if scores and (value := seed_adjusted(scores)[best := rank(scores)[0]]) > -math.inf:
            leader = f"{best}: {self._shown_metric} {self._as_metric(value):.4f}"
        self.on_progress(
            ChooseProgress(
                rung=number + 1,
                rungs=len(rung_epochs(self.epochs)),
                epochs=epochs,
                done=min(float(arms), sum(self._fractions.values())),
                arms=arms,
                leader=leader,
                spent=f"{self._amount(self._spent)} of {self._amount(self._allowed)}",
                message=message,
            )
        )

    def _as_metric(self, score: float) -> float:
        return score if self._higher_is_better else -score

    # The folder ---------------------------------------------------------------------------------------------------

    def _load(self) -> None:
        """Take over what an earlier call has done, if it was the same tournament."""
        path = self.folder / _STATE
        if not path.exists():
            return
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            same = found["identity"] == json.loads(json.dumps(self.identity))
            self._before_s = float(found["spent_s"])
            self.begun = [[(Candidate(rule, rate), seed) for rule, rate, seed in rung] for rung in found["rungs"]]
            self.left_out = {Candidate(rule, rate): why for rule, rate, why in found["left_out"]}
            self.timed = [(int(epochs), float(part), float(whole)) for epochs, part, whole in found["timed"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path}: cannot be read ({error}); choose another folder with {called('out')}") from None
        if not same:
            other = [key for key in self.identity if self.identity[key] != found["identity"].get(key)]
            raise ConfigError(
                f"{self.folder} holds another tournament; different: {', '.join(other)}. Choose another folder with "
                f"{called('out')}, or delete it"
            )
        self.ended = [{} for _ in self.begun]

    def _save(self, answer: Mapping[str, Any] | None = None) -> None:
        content = {
            "version": VERSION,
            "identity": self.identity,
            "spent_s": self._spent_s,
            "rungs": [[[one.rule, one.rate, seed] for one, seed in rung] for rung in self.begun],
            "left_out": [[one.rule, one.rate, why] for one, why in self.left_out.items()],
            "timed": self.timed,
            **({"answer": answer} if answer else {}),
        }
        write_whole(self.folder / _STATE, (json.dumps(content, indent=1) + "\n").encode())
        self._saved = time.monotonic()

    # The results --------------------------------------------------------------------------------------------------

    def _write(self, last: int | None, lengths: Sequence[int]) -> Chosen:
        """Decide, and write choice.toml and the answer."""
        ranking = self._ranking(last, lengths)
        why = self._why_undecided(last, lengths)
        if why:
            diverged = [row["rate"] for row in ranking if row["status"] == "diverged"]
            rate = min(1.0, *diverged) if diverged and len(diverged) == len(ranking) else 1.0
            rule, limited = self._fallback_rule()
            chosen = Candidate(rule, rate)
            note = f"{why} The fallback for this kind of optimizer is {rule} at {rate:g} times the base rate."
            if limited:
                note += f" The best fixed rule is another, but {limited}."
        else:
            chosen, note = Candidate(ranking[0]["rule"], ranking[0]["rate"]), ""
        if self._untried() and (self.timed or self.share is not None):
            names = ", ".join(str(one) for one in self._untried())
            where = " in another folder" if len(self.begun) > 1 else ""
            self.more.append(
                f"{len(self._untried())} of {len(self.candidates)} candidates were not tried ({names}); comparing all "
                f"of them takes {self._for_all(lengths)}{where}."
            )
        cost = self._cost()
        choice = Choice(
            rule=chosen.rule, lr=rounded_rate(self.base * chosen.rate), decided_by="fallback" if why else "tournament",
            note=note, source={**self.source, "rate": chosen.rate, "metric": self._shown_metric},
            ranking=tuple(ranking),
        )  # fmt: skip
        answer = {
            **choice.settings,
            "rate": chosen.rate,
            "decided_by": choice.decided_by,
            "note": note,
            "metric": self._shown_metric,
            "higher_is_better": self._higher_is_better,
            "source": choice.source,
            "ranking": ranking,
            "rungs": [
                {"epochs": epochs, "candidates": len({one for one, _ in ended}), "runs": len(ended)}
                for epochs, ended in zip(lengths, self.ended, strict=False)
            ],
            "left_out": [{"rule": one.rule, "rate": one.rate, "why": why} for one, why in self.left_out.items()],
            "cost": cost,
            "budget_s": self.budget_s,
            "budget_share": self.share,
            "budget": self._amount(self._allowed),
            "more": list(dict.fromkeys(self.more)),
            "command": self.command,
            "folder": str(self.folder),
        }
        write_choice(choice, self.folder / _CHOICE)
        self._save(answer)
        return Chosen(choice=choice, answer=answer, folder=self.folder)

    def _fallback_rule(self) -> tuple[str, str]:
        """A rule with which the run can be trained, and what keeps it from being the best fixed one, if anything."""
        rule, limited = self.fallback("")
        refused = [why for one, why in self.left_out.items() if one.rule == rule]
        return self.fallback(refused[0]) if refused else (rule, limited)

    def _ranking(self, last: int | None, lengths: Sequence[int]) -> list[dict[str, Any]]:
        """All candidates that were compared: those of the last rung first, each with its score in its last rung."""
        rows: list[dict[str, Any]] = []
        placed: set[Candidate] = set()
        for number in range(last if last is not None else 0, -1, -1):
            scores = self._scores(number)
            noise, adjusted = measured_noise(scores), seed_adjusted(scores)
            for one in (one for one in rank(scores) if one not in placed):
                placed.add(one)
                sound = adjusted[one] > -math.inf
                rows.append(
                    {
                        "place": len(rows) + 1,
                        "rule": one.rule,
                        "rate": one.rate,
                        "lr": rounded_rate(self.base * one.rate),
                        "epochs": lengths[number],
                        "seeds": len(scores[one]),
                        "score": self._as_metric(adjusted[one]) if sound else None,
                        "margin": noise.margin(len(scores[one])) if noise and sound else None,
                        "status": "finished" if sound else "diverged",
                    }
                )
        return rows

    def _why_undecided(self, last: int | None, lengths: Sequence[int]) -> str:
        """Why the tournament has no winner; empty if it has one."""
        scores = self._scores(last if last is not None else 0)
        if last is None or not scores:
            least = self._least_s(lengths[0])
            if least is None:
                return (
                    f"The budget of {self._amount(self._allowed)} is too small to train a single step: starting takes "
                    f"longer, {format_seconds(self._spent_s)} so far. How long a run takes is not known; a budget of a "
                    f"few minutes measures it, and the same command continues."
                )
            return (
                f"The budget of {self._amount(self._allowed)} ended before two candidates had trained for "
                f"{lengths[0]} {plural(lengths[0], 'epoch')}, which takes about {self._amount(least)}: that is the "
                f"least budget."
            )
        values = set(seed_adjusted(scores).values())
        if values == {-math.inf}:
            return (
                f"All {len(scores)} candidates diverged within {lengths[last]} "
                f"{plural(lengths[last], 'epoch')}; use a lower base rate, and check the model and its data."
            )
        if len(scores) > 1 and len(values) == 1:
            return (
                f"The metric {self._shown_metric} is {self._as_metric(values.pop()):g} for all {len(scores)} "
                f"candidates, so it decides nothing; check how it is computed, or use longer runs."
            )
        return ""

    def _least_s(self, epochs: int) -> float | None:
        """How long two candidates take in the first rung: from runs that ended, or from how far they came; None if no
        run has reported a step."""
        if self.share is not None:
            return 2.0 * epochs
        far = max(self._fractions.values(), default=0.0)
        if self.timed:
            needed = rung_seconds(2, epochs, self._pace, self._turns)
        elif self._first_step_s is not None and far > 0:
            training = (self._spent_s - self._first_step_s) / far
            needed = self._first_step_s + math.ceil(2 / self.jobs) * training
        else:
            return None
        return needed / (_SURE * (1 - _AT_THE_END))

    def _for_all(self, lengths: Sequence[int]) -> str:
        """The budget with which all candidates are compared, in words: as it was planned with, starting included."""
        whole = ladder_seconds(ladder(len(self.candidates), len(lengths)), lengths, self._pace, self._turns)
        if self.share is None:
            whole = (whole / _SURE + (self._first_step_s or self._preparing_s)) / (1 - _AT_THE_END)
        # Arms are not all equally fast: what the measured ones say may be less than what has not been enough.
        return f"about {self._amount(whole)}" if whole > self._allowed else f"more than {self._amount(self._allowed)}"

    def _cost(self) -> dict[str, Any]:
        ended = [one for rung in self.ended for one in rung.values()]
        epochs = self._epochs_done()
        return {
            "wall_s": self._spent_s,
            "runs": len(ended),
            "samples": sum(one.samples for one in ended),
            "epochs": epochs,
            "share": epochs / (len(self.candidates) * self.epochs),
            "jobs": self.jobs,
        }


@contextmanager
def _renamed_errors(folder: Path) -> Iterator[None]:
    """A record that cannot be read is an error of the folder."""
    try:
        yield
    except RecordError as error:
        raise OutputError(f"{folder}: {error}; choose another folder with {called('out')}") from error
