"""Cases: published runs as jobs with their measurements, and the deviations of their predictions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from rpbench.cost.published import DATA as PUBLISHED
from rpbench.cost.published import published_rows
from rpbench.mesh.exact import exact_terms
from rpbench.mesh.job import Job
from rpbench.mesh.memory import bytes_of_ranks, measured_bytes
from rpbench.mesh.software import Software
from rpbench.mesh.step import step_terms
from rpbench.yaml_file import read_keys

Row = dict[str, str]


class Said(NamedTuple):
    """A prediction by another model than that of meshes."""

    step_time_s: float | None = None
    tokens: int = 0
    memory_bytes: float | None = None
    devices: int = 1


@dataclass(frozen=True)
class Case:
    """A published run."""

    id: str  # `file/row` of its source
    job: Job | None  # None if it cannot be modelled, for the reason in `note`
    # step_time_s, memory_bytes: as measured, if they are given
    step_time_s: float | None = None
    memory_bytes: float | None = None
    early: bool = False  # measured in the slower, earlier sessions of its source
    repeats: int = 1  # how often the job's microbatches run in a step
    memory_rank: int | None = None  # the pipeline rank whose memory the source prints; None for the fullest
    configuration: str = ""  # rows with the same one are repeats
    fits: bool = True  # whether constants may be fitted on it
    verdict: str = ""  # `oom` or empty
    asks: tuple[str, ...] = ("time",)  # what the source prints: `time`, `memory` or both
    note: str = ""  # assumptions, or why it is not modelled
    exact: bool = False  # whether its pipeline is simulated instead of a closed form
    said: Said | None = None  # the prediction of another model, for a run that is no job on a mesh

    @property
    def tokens(self) -> int:
        """Tokens of one repetition of a step."""
        return self.job.tokens if self.job else self.said.tokens if self.said else 0

    @property
    def devices(self) -> int:
        return self.job.machine.size if self.job else self.said.devices if self.said else 1

    @property
    def modelled(self) -> Job:
        assert self.job is not None  # asked of cases with a job
        return self.job

    @property
    def measured_s(self) -> float:
        assert self.step_time_s is not None  # asked of cases with a measured step
        return self.step_time_s

    @property
    def set_name(self) -> str:
        return self.id.split("/")[0]


@dataclass
class Model:
    """Predictions with other constants of some frameworks, by name, as a fit tries them."""

    trying: dict[str, dict[str, float]] = field(default_factory=dict)

    def software(self, known: Software) -> Software:
        values = self.trying.get(known.name)
        return known.with_constants(values) if values else known

    def job(self, case: Case) -> Job:
        job = case.modelled
        found = self.software(job.software)
        return job if found is job.software else replace(job, software=found)

    def step_time_s(self, case: Case) -> float:
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


def rows_of(folder: str, name: str) -> Sequence[Row]:
    """The rows of `analysis/published/<folder>/<name>.csv`; none without such a file."""
    return published_rows(f"{folder}/{name}.csv") if (PUBLISHED / folder / f"{name}.csv").exists() else ()


def number(text: str | None) -> float | None:
    """A number, or None for an empty cell."""
    return float(text) if text else None


# --- spread: deviations of a prediction's logarithm -------------------------------------------------------------
#
# A set's own deviation is that of its given rows in the most similar hold-out (`clusters_holdout.csv`, the 90th
# percentile of absolute errors over 1.645). A property that no given row of the framework has (a device, a size of
# machine, a precision, the framework itself) adds its own deviation, and the prediction's note names it.


class Unseen(NamedTuple):
    """A deviation that adds to a set's own."""

    name: str  # as in notes
    log_sd: float
    why: str  # the reason for the size of the deviation
    # sets, devices, frameworks: the names it applies to, perhaps with `*` at the end; all if empty
    sets: Sequence[str] = ()
    devices: Sequence[str] = ()
    frameworks: Sequence[str] = ()
    only: str = ""  # one of `ONLY`, if it applies to some of these alone

    def applies(self, case: Case) -> bool:
        job = case.job
        named = (case.set_name, job.machine.device.name if job else "", job.software.name if job else "")
        asked = (self.sets, self.devices, self.frameworks)
        return all(
            not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)
            for name, patterns in zip(named, asked, strict=True)
        ) and (not self.only or (job is not None and ONLY[self.only](job)))


def _shards_optimizer(job: Job) -> bool:
    return job.mesh.sharing.what == "optimizer"


ONLY: dict[str, Callable[[Job], bool]] = {
    "experts": lambda job: job.architecture.experts is not None,
    "nvfp4": lambda job: job.precision == "nvfp4",
    "adapters or a sharded optimizer": lambda job: job.adapters is not None or _shards_optimizer(job),
    # More than twice the nodes of any given row.
    "large groups of owners": lambda job: _shards_optimizer(job) and job.mesh.shard_group * job.mesh.tensor > 256,
}

TABLES: dict[str, Any] = read_keys(Path(__file__).with_name("spread.yaml"))
# Deviations of each set's steps and bytes; the file has the reasons as well.
STEP, MEMORY = ({name: sd for name, (sd, _) in TABLES[table].items()} for table in ("step", "memory"))
UNSEEN = tuple(Unseen(**row) for row in TABLES["unseen"])


def unseen(case: Case) -> list[Unseen]:
    """The properties of a row that no given row has."""
    return [each for each in UNSEEN if each.applies(case)]


def step_log_sd(case: Case) -> float:
    """Deviation of the logarithm of a predicted step."""
    return float((STEP[case.set_name] ** 2 + sum(each.log_sd**2 for each in unseen(case))) ** 0.5)
