"""A duel from configuration to records: profile, tune, check, play rounds, write a record for every contender."""

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

from baselines.systems.case import Case
from baselines.systems.ranks import RankFailed, Ranks
from rpbench.cost.profiled import to_text
from rpbench.engine.backends.cpu import CpuBackend
from rpbench.engine.executor import ActionFailed
from rpbench.engine.measure.calibration import Calibration, calibrate_cores
from rpbench.engine.program import make_program
from rpbench.engine.state.optimizer import OptimizerSettings
from rpbench.engine.training import Settings
from rpbench.harness import record, tracking
from rpbench.harness.choices import Duel
from rpbench.harness.modes.duel.contenders import BASE, Contender, contenders
from rpbench.harness.modes.duel.emulation import emulated_makespans
from rpbench.harness.modes.duel.rounds import play
from rpbench.harness.modes.duel.rows import calibrated_fields, lines, plan_fields, sample_fields, summary
from rpbench.harness.modes.duel.survey import Survey
from rpbench.harness.modes.duel.team import EngineTeam, LimitTeam, Parity, Team, TorchTeam
from rpbench.harness.modes.duel.tuning import problem_of, tuned
from rpbench.harness.record import Record
from rpbench.harness.recording import identity, may_be_found, names, origin
from rpbench.harness.request import Request
from rpbench.harness.scheduled import PROFILE
from rpbench.harness.tensors import one_thread, workload_of
from rpbench.plan.whole import WholePlan

SUMMARY = "summary.json"  # in the folder of 1F1B
CLUSTER = "cluster.yaml"  # beside it: what the calibration before the first round found


def records(request: Request) -> list[Record]:
    """The records of every contender, made or found; all are on disk when this returns.

    Raises:
        ValueError: if the request is wrong; nothing is written then.
    """
    entrants, results = contenders(), request.results_dir
    ids = {entrant.name: record.run_id({**identity(request), "contender": entrant.name}) for entrant in entrants}
    record.check_writable(results, "results_dir")
    known = [record.read(results / run_id) for run_id in ids.values()]
    if may_be_found(request) and all(row is not None and row["status"] != "failed" for row in known):
        return [row for row in known if row is not None]
    with one_thread():
        times = problem_of(request, entrants[0]).times
        under_way = _Duel(request, entrants)
        rows = under_way.rows()
    for entrant, row in zip(entrants, rows, strict=True):
        row |= {"run_id": ids[entrant.name], "config": dict(request.subject)}
        record.write_atomically(results / row["run_id"] / PROFILE, to_text(times))
        record.write(results / row["run_id"], row)
        tracking.mirror(request, row, None)
    if under_way.survey is not None:
        text = under_way.survey.first_file()
        record.write_atomically(results / ids[BASE] / CLUSTER, text)
    found = summary(rows)
    record.write_atomically(results / ids[BASE] / SUMMARY, json.dumps(found, indent=1) + "\n")
    _tell("\n".join(lines(found)))
    return rows


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class _Duel:
    """A duel under way."""

    def __init__(self, request: Request, entrants: list[Contender]) -> None:
        assert isinstance(request.mode, Duel)
        assert request.model is not None
        self._request, self._settings, self._entrants = request, request.mode, entrants
        self._model = request.model
        self._sequences = request.workload.microbatch_sequences
        asked = request.optimizer
        self._optimizer = OptimizerSettings(asked.learning_rate, asked.weight_decay)
        self.survey = self._surveyor() if self._settings.calibrate else None

    def _surveyor(self) -> Survey:
        """Calibrates as many cores as there are devices; the tokens are those of the contenders."""
        num_devices = self._request.num_devices

        def measure() -> Calibration:
            self._tell("calibrating the machine")
            return calibrate_cores(num_devices, lambda line: None)

        return Survey(measure, self._model, self._sequences * self._model.seq_len, num_devices)

    def rows(self) -> list[Record]:
        """The record of every contender, in order."""
        plans = tuned(
            self._request,
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
        window = self._request.num_microbatches
        workload = workload_of(self._model, self._sequences, self._request.dtype, self._request.seed, window)
        backend = stack.enter_context(CpuBackend())
        for entrant in self._entrants:
            plan = plans[entrant.name]
            if entrant.engine == "torch":
                ranks = stack.enter_context(Ranks(self._request.num_devices, self._settings.timeout_s))
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
            self._request.num_microbatches,
            "1F1B",
            self._sequences,
            self._request.num_steps,
            self._request.seed,
            self._request.dtype,
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
        named = names(self._request) | {"schedule": entrant.schedule, "dispatch": entrant.dispatch}
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
        tokens = self._request.num_microbatches * self._sequences * self._model.seq_len
        fields = sample_fields(samples, plan)
        return fields | {"tokens_per_step": tokens, "tokens_per_s": tokens / fields["step_time_s"]}
