"""Spread: how far a prediction may be off, as deviations of its logarithm: a set's own, and what was never seen of it.

A set's own deviation is that of its given rows in the hold-out most like what is asked (`clusters_holdout.csv`, the
90th percentile of absolute errors over 1.645). What no given row of its framework has (a device, a size of machine,
a kind of number, the framework itself) adds its deviation, and the prediction's note says so.
"""

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from analysis.predictions.clusters.case import Case
from rpbench.mesh.job import Job
from rpbench.yaml_file import read_keys


class Spread(NamedTuple):
    """A deviation, and what it rests on."""

    log_sd: float
    why: str


class Unseen(NamedTuple):
    """A deviation that adds to a set's own.

    Args:
        name: as a note says it.
        why: the deviation is what it is.
        sets, devices, frameworks: whose rows it is of, by names or their beginnings with a `*`; of all if empty.
        only: one of `ONLY`, where it is of some of these alone.
    """

    name: str
    log_sd: float
    why: str
    sets: Sequence[str] = ()
    devices: Sequence[str] = ()
    frameworks: Sequence[str] = ()
    only: str = ""

    def applies(self, case: Case) -> bool:
        """Whether it is of a row."""
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
    # On more than twice as many nodes as were seen.
    "large groups of owners": lambda job: _shards_optimizer(job) and job.mesh.shard_group * job.mesh.tensor > 256,
}

_TABLES: dict[str, Any] = read_keys(Path(__file__).with_suffix(".yaml"))
STEP, MEMORY = ({name: Spread(*row) for name, row in _TABLES[table].items()} for table in ("step", "memory"))
UNSEEN = tuple(Unseen(**row) for row in _TABLES["unseen"])


def unseen(case: Case) -> list[Unseen]:
    """The properties of a row that no given row has."""
    return [each for each in UNSEEN if each.applies(case)]


def step_log_sd(case: Case) -> float:
    """Deviation of the logarithm of a predicted step."""
    own = STEP[case.set_name].log_sd
    return float((own**2 + sum(each.log_sd**2 for each in unseen(case))) ** 0.5)


def memory_log_sd(case: Case) -> float:
    """Deviation of the logarithm of predicted bytes."""
    return MEMORY[case.set_name].log_sd
