"""Sizes and words of a request that any mode refuses."""

import math
import os

from rpbench.config.choices import ConfigError, at_least_one
from rpbench.config.configuration import RunConfig
from rpbench.passes.recomputation import RECOMPUTES

DTYPES = ("float64", "float32", "bfloat16", "float16")
_LARGEST = 10**6
_MOST_FORWARDS = 2**22
_BYTES_PER_FORWARD = 2000  # of a table that is checked and simulated; 900 to 2,800 were measured, by schedule
_MOST_PLACES = 2**28  # stages x devices: what is asked of every pair of them takes a byte
MOST_LAYERS_TO_CUT = 10**6  # of the model without a shape, which has as many layers as a schedule has stages


def num_layers(config: RunConfig) -> int | None:
    """The layers that a request asks for; None: as many as its model has.

    Raises:
        ConfigError: if it is no number that can be cut.
    """
    given = config.model.get("num_layers")
    if given is not None and (type(given) is not int or not 1 <= given <= MOST_LAYERS_TO_CUT):
        raise ConfigError(f"model.num_layers={given!r:.60}: a whole number from 1 to {MOST_LAYERS_TO_CUT:,}")
    return given


def check_sizes(config: RunConfig, num_ranks: int) -> None:
    """Refuse numbers that no table in memory holds, and words that name nothing.

    Args:
        num_ranks: rows of the schedule; under a mesh there are fewer than devices.

    Raises:
        ConfigError: naming the key and what it may be.
    """
    at_least_one(config, "", "num_devices", "num_microbatches", "num_steps", "chunks_per_device", "tuning_budget")
    for name in ("num_devices", "num_microbatches", "num_steps", "chunks_per_device", "tuning_budget", "prefetch"):
        if (getattr(config, name) or 1) > _LARGEST:
            raise ConfigError(f"{name}={getattr(config, name)}: at most {_LARGEST:,}; a schedule is a table in memory")
    _check_table(config, num_ranks)
    if config.dtype not in DTYPES:
        raise ConfigError(f"dtype={config.dtype}: one of {', '.join(DTYPES)}")
    if not config.results_dir:
        raise ConfigError("results_dir=: name a folder, as in results_dir=results")
    if config.recompute not in RECOMPUTES:
        raise ConfigError(f"recompute={config.recompute}: one of {', '.join(RECOMPUTES)}")


def _check_table(config: RunConfig, num_ranks: int) -> None:
    """Refuse a schedule whose table does not fit the memory that is free here."""
    chunks = config.chunks_per_device or 1
    forwards = num_ranks * chunks * config.num_microbatches * config.num_steps
    sizes = f"num_devices={config.num_devices} num_microbatches={config.num_microbatches} num_steps={config.num_steps}"
    sizes += f" chunks_per_device={chunks}" if config.chunks_per_device else ""
    if forwards > _MOST_FORWARDS:
        raise ConfigError(f"{sizes}: {forwards:,} forwards; at most {_MOST_FORWARDS:,} fit a table in memory")
    if num_ranks * num_ranks * chunks > _MOST_PLACES:
        most = math.isqrt(_MOST_PLACES // chunks)
        raise ConfigError(f"{sizes}: {num_ranks:,} ranks; a table has at most {most:,} with so many chunks")
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    if forwards * _BYTES_PER_FORWARD > there:
        raise ConfigError(
            f"{sizes}: {forwards:,} forwards, a table of some {forwards * _BYTES_PER_FORWARD / 1e9:.1f} GB; "
            f"{there / 1e9:.1f} GB are free here. Ask for fewer"
        )
