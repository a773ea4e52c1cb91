"""Case: one published run as a job, with what was measured of it, if that is given."""

import csv
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from rpbench.mesh.exact import exact_terms
from rpbench.mesh.job import Job
from rpbench.mesh.memory import bytes_of_ranks, measured_bytes
from rpbench.mesh.software import Software
from rpbench.mesh.step import step_terms

PUBLISHED = Path(__file__).resolve().parents[2] / "published"
Row = dict[str, str]


class Said(NamedTuple):
    """The prediction of another model than that of meshes: seconds of a step and its tokens, bytes, devices."""

    step_time_s: float | None = None
    tokens: int = 0
    memory_bytes: float | None = None
    devices: int = 1


@dataclass(frozen=True)
class Case:
    """A run.

    Args:
        id: `file/row` of its source.
        job: what ran; None where it cannot be modelled, for the reason in `note`.
        step_time_s, memory_bytes: as measured; None where not given.
        early: measured in the slower, earlier sessions of its source.
        repeats: how often the job's microbatches run in a step.
        memory_rank: the pipeline rank whose memory the source prints; None for the fullest.
        configuration: rows with equal ones are repeats.
        fits: whether constants may be fitted on it.
        verdict: `oom` where the source says so.
        asks: what the source prints: `time`, `memory` or both.
        note: what had to be assumed, or why it is not modelled.
        exact: whether its pipeline is simulated, not taken from a closed form.
        said: what another model predicts, of a run that is no job of a mesh.
    """

    id: str
    job: Job | None
    step_time_s: float | None = None
    memory_bytes: float | None = None
    early: bool = False
    repeats: int = 1
    memory_rank: int | None = None
    configuration: str = ""
    fits: bool = True
    verdict: str = ""
    asks: tuple[str, ...] = ("time",)
    note: str = ""
    exact: bool = False
    said: Said | None = None

    @property
    def tokens(self) -> int:
        """Tokens of a step, its repetitions apart."""
        return self.job.tokens if self.job else self.said.tokens if self.said else 0

    @property
    def devices(self) -> int:
        """Devices of the run."""
        return self.job.machine.size if self.job else self.said.devices if self.said else 1

    @property
    def set_name(self) -> str:
        """The file the run stands in."""
        return self.id.split("/")[0]


@dataclass
class Model:
    """Softwares by name, with constants that a fit is trying out."""

    trying: dict[str, dict[str, float]] = field(default_factory=dict)

    def software(self, known: Software) -> Software:
        """That framework with the constants on trial."""
        values = self.trying.get(known.name)
        return known.with_constants(values) if values else known

    def job(self, case: Case) -> Job:
        """The job of a case with the constants on trial."""
        assert case.job is not None
        found = self.software(case.job.software)
        return case.job if found is case.job.software else replace(case.job, software=found)

    def step_time_s(self, case: Case) -> float:
        """Predicted seconds of a step."""
        if case.said and case.said.step_time_s:
            return case.said.step_time_s
        job = self.job(case)
        found = sum((exact_terms(job) if case.exact else step_terms(job)).values()) * case.repeats
        return found * (job.software.constants["session"] if case.early else 1.0)

    def memory_bytes(self, case: Case) -> float:
        """Predicted bytes as the source counts them."""
        if case.said and case.said.memory_bytes:
            return case.said.memory_bytes
        job = self.job(case)
        ranks = bytes_of_ranks(job)
        counted = ranks if case.memory_rank is None else [ranks[case.memory_rank % len(ranks)]]
        return max(measured_bytes(job, classes) for classes in counted)


def rows_of(folder: str, name: str) -> Iterator[Row]:
    """The rows of `analysis/published/<folder>/<name>.csv`."""
    path = PUBLISHED / folder / f"{name}.csv"
    if path.exists():
        with path.open(newline="") as file:
            yield from csv.DictReader(file)


def number(text: str | None) -> float | None:
    """A number, or None for an empty cell."""
    return float(text) if text not in (None, "") else None
