"""A duel from configuration to records: profile, tune, check, play rounds, write a record for every contender."""

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from baselines.systems.case import Case
from baselines.systems.ranks import RankFailed, Ranks
from rpbench.cost.model import Model
from rpbench.cost.profiled import to_text
from rpbench.engine.backends.cpu import CpuBackend
from rpbench.engine.executor import ActionFailed
from rpbench.engine.measure.calibration import Calibration, calibrate_cores
from rpbench.engine.program import make_program
from rpbench.engine.state.optimizer import OptimizerSettings
from rpbench.engine.training import Settings
from rpbench.harness import provenance, record, tracker
from rpbench.harness.config import ConfigError, RunConfig, WorkloadConfig, as_plain, resolved, typed
from rpbench.harness.duel.contenders import BASE, Contender, contenders
from rpbench.harness.duel.emulation import emulated_makespans
from rpbench.harness.duel.rounds import play
from rpbench.harness.duel.rows import calibrated_fields, lines, plan_fields, sample_fields, summary
from rpbench.harness.duel.survey import Survey
from rpbench.harness.duel.team import EngineTeam, LimitTeam, Parity, Team, TorchTeam
from rpbench.harness.duel.tuning import problem_of, tuned
from rpbench.harness.record import Record
from rpbench.harness.run import PROFILE, names, origin
from rpbench.harness.train import one_thread, workload_of
from rpbench.plan.whole import WholePlan

SUMMARY = "summary.json"  # in the folder of 1F1B
CLUSTER = "cluster.yaml"  # beside it: what the calibration before the first round found


@dataclass
class DuelConfig:
    """The keys of `conf/backend/duel.yaml`."""

    name: str
    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    num_rounds: int = 3
    search_budget: int = 400
    recompute: str = "except_last"
    parity_seq_len: int = 16
    timeout_s: float = 120.0
    calibrate: bool = True

    def __post_init__(self) -> None:
        for name in ("num_rounds", "search_budget", "parity_seq_len"):
            if getattr(self, name) < 1:
                raise ConfigError(f"backend.{name}={getattr(self, name)}: a whole number of at least 1")
        if self.recompute not in ("all", "except_last"):
            raise ConfigError(f"backend.recompute={self.recompute}: all or except_last")


def duel(config: RunConfig) -> list[Record]:
    """The records of every contender, made or found; all are on disk when this returns.

    Raises:
        ValueError: if the request is wrong; nothing is written then.
    """
    settings = typed(DuelConfig, config.backend)
    if config.model["name"] == "abstract":
        raise ConfigError("backend=duel trains tensors, which model=abstract does not have; take model=mid_gpt")
    subject, entrants = as_plain(resolved(config)), contenders()
    ids = {entrant.name: _run_id(subject, entrant) for entrant in entrants}
    results = Path(config.results_dir)
    known = [record.read(results / run_id) for run_id in ids.values()]
    if not config.force and all(row is not None and row["status"] != "failed" for row in known):
        return [row for row in known if row is not None]
    with one_thread():
        times = problem_of(config, entrants[0]).times
        under_way = _Duel(config, settings, entrants)
        rows = under_way.rows()
    for entrant, row in zip(entrants, rows, strict=True):
        row |= {"run_id": ids[entrant.name], "config": subject}
        record.write_atomically(results / row["run_id"] / PROFILE, to_text(times))
        record.write(results / row["run_id"], row)
        tracker.mirror(config, row, None)
    if under_way.survey is not None:
        text = under_way.survey.first_file()
        record.write_atomically(results / ids[BASE] / CLUSTER, text)
    found = summary(rows)
    record.write_atomically(results / ids[BASE] / SUMMARY, json.dumps(found, indent=1) + "\n")
    _tell("\n".join(lines(found)))
    return rows


def _run_id(subject: dict[str, Any], entrant: Contender) -> str:
    return record.run_id({**subject, "contender": entrant.name}, provenance.code_version())


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class _Duel:
    """A duel under way."""

    def __init__(self, config: RunConfig, settings: DuelConfig, entrants: list[Contender]) -> None:
        self._config, self._settings, self._entrants = config, settings, entrants
        self._model = Model(**config.model)
        self._sequences = typed(WorkloadConfig, config.workload).microbatch_sequences
        self._optimizer = OptimizerSettings(settings.learning_rate, settings.weight_decay)
        self.survey = self._surveyor() if settings.calibrate else None

    def _surveyor(self) -> Survey:
        """Calibrates as many cores as there are devices; the tokens are those of the contenders."""
        num_devices = self._config.num_devices

        def measure() -> Calibration:
            self._tell("calibrating the machine")
            return calibrate_cores(num_devices, lambda line: None)

        return Survey(measure, self._model, self._sequences * self._model.seq_len, num_devices)

    def rows(self) -> list[Record]:
        """The record of every contender, in order."""
        plans = tuned(
            self._config,
            self._entrants,
            self._settings.search_budget,
            keeps_last=self._settings.recompute == "except_last",
        )
        with ExitStack() as stack:
            teams = dict(self._teams(plans, stack))
            parities = {name: self._parity(name, team) for name, team in teams.items()}
            fit = {name: team for name, team in teams.items() if not parities[name]["reason"]}
            emulated = emulated_makespans({name: plans[name] for name in fit})
            samples = play(fit, self._settings.num_rounds, self._tell, self.survey or (lambda: None))
        rows = []
        for entrant in self._entrants:
            name, plan = entrant.name, plans[entrant.name]
            row = self._opening(entrant, plan) | parities[name]
            if name in fit:
                row |= {"emulated_makespan_s": emulated[name]} | self._timed(samples[name], plan)
                if self.survey is not None:
                    waits = entrant.engine != "side by side"
                    row |= calibrated_fields(self.survey.makespans(plan, waits=waits), self.survey.foreign_cores)
            else:
                row |= {"status": "failed", "evidence": None}
            rows.append(row)
        return rows

    def _tell(self, line: str) -> None:
        _tell(f"duel {self._model.name}: {line}")

    def _teams(self, plans: dict[str, WholePlan], stack: ExitStack) -> Iterator[tuple[str, Team]]:
        window = self._config.num_microbatches
        workload = workload_of(self._model, self._sequences, self._config.dtype, self._config.seed, window)
        backend = stack.enter_context(CpuBackend())
        for entrant in self._entrants:
            plan = plans[entrant.name]
            if entrant.engine == "torch":
                ranks = stack.enter_context(Ranks(self._config.num_devices, self._settings.timeout_s))
                yield entrant.name, TorchTeam(plan, self._case(plan), ranks, make_program(plan.schedule, plan.costs))
            else:
                kind = LimitTeam if entrant.engine == "side by side" else EngineTeam
                settings = Settings(self._optimizer, recompute="except_last" if plan.keeps_last else "all")
                yield entrant.name, kind(plan, workload, settings, backend)

    def _case(self, plan: WholePlan) -> Case:
        assert plan.schedule.partition is not None
        return Case(
            "torch_pipelining",
            asdict(self._model),
            self._config.num_microbatches,
            "1F1B",
            self._sequences,
            self._config.num_steps,
            self._config.seed,
            self._config.dtype,
            plan.schedule.partition.forward,
            recompute="except_last" if plan.keeps_last else "all",
            optimizer={
                "learning_rate": self._optimizer.learning_rate,
                "weight_decay": self._optimizer.weight_decay,
            },
        )

    def _parity(self, name: str, team: Team) -> Parity:
        """Its distance from plain training, and why it may not enter, if it may not."""
        try:
            found = team.check(self._settings.parity_seq_len)
        except (ActionFailed, RankFailed, ValueError, RuntimeError) as error:
            return {"parity": False, "reason": f"{type(error).__name__}: {error}"}
        far = max(found["grad_max_abs_diff"], found["weight_max_abs_diff"])
        sound = far <= team.tolerance and found.get("versions_as_reference", True)
        reason = None if sound else f"it does not train as plain training does: off by {far:g}"
        self._tell(f"{name} within {far:g} of plain training")
        return found | {"parity": sound, "parity_seq_len": self._settings.parity_seq_len, "reason": reason}

    def _opening(self, entrant: Contender, plan: WholePlan) -> Record:
        named = names(self._config) | {"schedule": entrant.schedule, "dispatch": entrant.dispatch}
        return {
            **named,
            "contender": entrant.name,
            "engine": entrant.engine,
            **origin(),
            "status": "ok",
            "reason": None,
            "evidence": "measured",
            **plan_fields(plan),
        }

    def _timed(self, samples: list[Any], plan: WholePlan) -> Record:
        tokens = self._config.num_microbatches * self._sequences * self._model.seq_len
        fields = sample_fields(samples, plan)
        return fields | {"tokens_per_step": tokens, "tokens_per_s": tokens / fields["step_time_s"]}
