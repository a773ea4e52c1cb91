"""Sweeper: all combinations of the swept values, with a manifest of the cells, and an end that counts them."""

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from omegaconf import DictConfig

from rpbench.harness.choices import ConfigError
from rpbench.harness.manifest import write_plan
from rpbench.harness.record import check_writable


class RunFailed(RuntimeError):
    """A run that broke through no fault of the request."""


@dataclass(frozen=True)
class ManifestSweeper:
    """Every combination of the swept values, written down before the first runs.

    Each cell is composed once, by the process that runs it: what cannot be composed ends as a refused cell.

    Args:
        config: as Hydra composes it for a multirun.
        launcher: runs the cells.
        loader: what the ranges and globs of overrides are expanded with.
    """

    config: DictConfig
    launcher: Launcher
    loader: ConfigLoader

    def sweep(self, arguments: Sequence[str]) -> Sequence[JobReturn]:
        """Run every cell of the command line, and of the experiment it names.

        Raises:
            ConfigError: if there is no cell, or no place for records; or the first error of a cell that ended so.
        """
        cells = self.cells(arguments)
        if not cells:
            raise ConfigError(f"nothing to sweep: {_empty(arguments)} gives no value; name at least one")
        results = Path(self.config.hydra.sweep.dir)
        check_writable(results, "results_dir")
        experiment = self.config.hydra.runtime.choices.get("experiment")
        plan = write_plan(results, None if experiment in (None, "null") else str(experiment), arguments, cells)
        batch = [[*cell, f"hydra.job.name='{plan}'"] for cell in cells]
        ended = self.launcher.launch(batch, initial_job_idx=0)
        _raise_first(ended)
        return ended

    def cells(self, arguments: Sequence[str]) -> list[tuple[str, ...]]:
        """The overrides of every cell: what is swept varies, the last key the fastest; an argument replaces a sweep."""
        swept = [f"{key}={values}" for key, values in (self.config.hydra.sweeper.params or {}).items()]
        parser = OverridesParser.create(config_loader=self.loader)
        values = {item.get_key_element(): _values(item) for item in parser.parse_overrides([*swept, *arguments])}
        return list(product(*values.values()))


def _values(override: Override) -> list[str]:
    """An override for each value that it sweeps."""
    key = override.get_key_element()
    if not override.is_sweep_override():
        return [f"{key}={override.get_value_element_as_str()}"]
    if not override.is_discrete_sweep():
        raise ConfigError(f"{override.input_line}: an interval has no end of values; list them, or take range(...)")
    return [f"{key}={value}" for value in override.sweep_string_iterator()]


def _empty(arguments: Sequence[str]) -> str:
    """The swept argument that is likely to have no values."""
    found = [item for item in arguments if any(mark in item for mark in ("glob(", "range(", "choice("))]
    return " ".join(found) or "the sweep"


def _raise_first(ended: Sequence[JobReturn]) -> None:
    """Raise the first error of a sweep that has some, behind a line that counts its cells."""
    errors: list[Any] = [job._return_value for job in ended if job.status is JobStatus.FAILED]
    if not errors:
        return
    kinds = Counter("refused" if isinstance(error, ValueError) else "failed" for error in errors)
    counts = ", ".join(f"{number} {kind}" for kind, number in sorted(kinds.items()))
    print(f"rpbench: of {len(ended)} cells {len(ended) - len(errors)} ended, {counts}", file=sys.stderr)
    raise next((error for error in errors if not isinstance(error, ValueError)), errors[0])
