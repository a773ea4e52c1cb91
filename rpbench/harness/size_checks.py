"""Sizes and words of a request that any mode refuses."""

from rpbench.harness.choices import ConfigError, at_least_one
from rpbench.harness.config import RunConfig
from rpbench.passes.recomputation import RECOMPUTES

DTYPES = ("float64", "float32", "bfloat16", "float16")
_LARGEST = 10**6
_MOST_CELLS = 2**26  # forwards of a schedule: some 20 GB of actions


def check_sizes(config: RunConfig) -> None:
    """Refuse numbers that no table in memory holds, and words that name nothing.

    Raises:
        ConfigError: naming the key and what it may be.
    """
    at_least_one(config, "", "num_devices", "num_microbatches", "num_steps", "chunks_per_device", "tuning_budget")
    for name in ("num_devices", "num_microbatches", "num_steps", "chunks_per_device"):
        if (getattr(config, name) or 1) > _LARGEST:
            raise ConfigError(f"{name}={getattr(config, name)}: at most {_LARGEST:,}; a schedule is a table in memory")
    if (cells := (config.num_devices or 1) * config.num_microbatches * config.num_steps) > _MOST_CELLS:
        raise ConfigError(
            f"num_devices={config.num_devices} num_microbatches={config.num_microbatches} "
            f"num_steps={config.num_steps}: {cells:,} forwards; at most {_MOST_CELLS:,} fit a table in memory"
        )
    if config.dtype not in DTYPES:
        raise ConfigError(f"dtype={config.dtype}: one of {', '.join(DTYPES)}")
    if not config.results_dir:
        raise ConfigError("results_dir=: name a folder, as in results_dir=results")
    if config.recompute not in RECOMPUTES:
        raise ConfigError(f"recompute={config.recompute}: one of {', '.join(RECOMPUTES)}")
