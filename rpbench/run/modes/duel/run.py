"""A duel from configuration to records: plan, check, play each start in a process of its own, write all records."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

from rpbench import tracking
from rpbench.config.choices import Duel
from rpbench.config.request import Request
from rpbench.cost.profiled import to_text
from rpbench.engine.backends.cpu import usable_cores
from rpbench.engine.measure.calibration import Calibration, calibrate_cores
from rpbench.records import record
from rpbench.records.record import Record
from rpbench.run.modes.duel.contenders import BASE, REFERENCES, Contender, contenders
from rpbench.run.modes.duel.emulation import emulated_makespans
from rpbench.run.modes.duel.job import Job, job_of
from rpbench.run.modes.duel.parity import check_parity, without
from rpbench.run.modes.duel.plans import make_plans, plans_text
from rpbench.run.modes.duel.rows import calibrated_fields, plan_fields, timed_fields
from rpbench.run.modes.duel.run_off import Raced, chosen, run_off, told
from rpbench.run.modes.duel.start import start_apart
from rpbench.run.modes.duel.started import Started
from rpbench.run.modes.duel.summary import lines, summary
from rpbench.run.modes.duel.survey import Survey
from rpbench.run.modes.duel.tuning import complete
from rpbench.run.recording import identity, may_be_found, names, origin
from rpbench.run.scheduled import PROFILE
from rpbench.run.training.tensors import one_thread

SUMMARY = "summary.json"  # in the folder of 1F1B
CLUSTER = "cluster.yaml"  # beside it: what the calibration before the first start found
PLANS = "plans.json"  # beside it: what everybody ran


def records(request: Request) -> list[Record]:
    """The records of every contender, made or found; all are on disk when this returns.

    Raises:
        ValueError: if the request is wrong; nothing is written then.
    """
    assert isinstance(request.mode, Duel)
    entrants, results = contenders(request.mode.contenders), request.results_dir
    ids = {entrant.name: record.run_id({**identity(request), "contender": entrant.name}) for entrant in entrants}
    record.check_writable(results, "results_dir")
    known = [record.read(results / run_id) for run_id in ids.values()]
    if may_be_found(request) and all(row is not None and row["status"] != "failed" for row in known):
        return [row for row in known if row is not None]
    with one_thread():
        times, shortlists = make_plans(request, entrants)
    raced = run_off(request, entrants, shortlists, start_apart)
    plans = complete(entrants, {name: chosen(own).plan for name, own in raced.items()})
    under_way = _Duel(request, job_of(request, entrants, plans), raced)
    rows = under_way.rows()
    for entrant, row in zip(entrants, rows, strict=True):
        row |= {"run_id": ids[entrant.name], "config": dict(request.subject)}
        record.write_atomically(results / row["run_id"] / PROFILE, to_text(times))
        row |= record.write(results / row["run_id"], row)
        tracking.mirror(request, row, None)
    folder, found = results / ids[BASE], summary(rows)
    record.write_atomically(folder / PLANS, plans_text(times, plans, raced))
    if under_way.survey is not None:
        record.write_atomically(folder / CLUSTER, under_way.survey.first_file())
    record.write_atomically(folder / SUMMARY, json.dumps(found, indent=1) + "\n")
    _tell("\n".join(lines(found)))
    return rows


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class _Duel:
    """A duel under way."""

    def __init__(self, request: Request, job: Job, raced: Mapping[str, Sequence[Raced]]) -> None:
        assert isinstance(request.mode, Duel)
        self._request, self._mode, self._job, self._raced = request, request.mode, job, raced
        self.survey = self._surveyor() if self._mode.calibrate else None

    def _surveyor(self) -> Survey:
        """Calibrates as many cores as there are devices; the tokens are those of the contenders."""
        job = self._job

        def measure() -> Calibration:
            self._tell("calibrating the machine")
            return calibrate_cores(job.num_devices, lambda line: None)

        return Survey(measure, job.model, job.sequences * job.model.seq_len, job.num_devices)

    def rows(self) -> list[Record]:
        """The record of every contender, in order."""
        job, mode = self._job, self._mode
        for name, plans in self._raced.items():
            if len(plans) > 1:
                self._tell(told(name, plans))
        self._tell(f"{mode.num_starts} starts of at most {mode.budget_s:g} s each, {len(job.entrants)} contenders")
        if len(usable_cores()) < job.num_devices:
            self._tell(f"{job.num_devices} devices on {len(usable_cores())} core: one turn, and no verdict")
        parities = check_parity(job, mode.parity_seq_len)
        fit = without(job, parities)
        names = [entrant.name for entrant in fit.entrants]
        emulated = emulated_makespans({name: job.plans[name] for name in names})
        starts = self._starts(fit) if any(name in names for name in REFERENCES) else []
        lost = f"nobody to compare with: {BASE} does not train as plain training does"
        rows = []
        for entrant in job.entrants:
            name = entrant.name
            row = self._opening(entrant) | parities[name]
            if name not in names or not starts:
                rows.append(row | {"status": "failed", "evidence": None, "reason": row["reason"] or lost})
                continue
            row |= {"emulated_makespan_s": emulated[name]} | self._timed(name, starts)
            if self.survey is not None:
                waits = entrant.engine != "side by side"
                makespans = self.survey.makespans(job.plans[name], waits=waits)
                row |= calibrated_fields(makespans, self.survey.foreign_cores)
            rows.append(row)
        return rows

    def _starts(self, job: Job) -> list[Started]:
        """Each in a process of its own, the machine calibrated before, between and after them."""
        measure = self.survey or (lambda: None)
        measure()
        starts = []
        for number in range(self._mode.num_starts):
            starts.append(start_apart(replace(job, order_seed=job.order_seed + number)))
            measure()
        return starts

    def _tell(self, line: str) -> None:
        _tell(f"duel {self._job.model.name}: {line}")

    def _opening(self, entrant: Contender) -> Record:
        named = names(self._request) | {"schedule": entrant.schedule, "dispatch": entrant.dispatch}
        return {
            **named,
            "contender": entrant.name,
            "engine": entrant.engine,
            **origin(),
            "status": "ok",
            "reason": None,
            "evidence": "measured",
            **plan_fields(self._job.plans[entrant.name], len(self._raced.get(entrant.plan_of or entrant.name, ()))),
        }

    def _timed(self, name: str, starts: list[Started]) -> Record:
        job = self._job
        tokens = job.num_microbatches * job.sequences * job.model.seq_len
        fields = timed_fields(name, starts, job.plans[name])
        return fields | {"tokens_per_step": tokens, "tokens_per_s": tokens / fields["step_time_s"]}
