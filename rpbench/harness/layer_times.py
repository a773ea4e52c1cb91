"""`cost=profiled`: layer times measured on this machine, or read from the file of an earlier run."""

import os
from functools import cache
from pathlib import Path

from rpbench.cost.model import Model
from rpbench.cost.profiled import read_profile
from rpbench.cost.table import LayerTimes
from rpbench.harness.config import ConfigError, CostConfig, RunConfig


def profiled_times(config: RunConfig, cost: CostConfig, model: Model | None) -> LayerTimes:
    """The layer times of a configuration; measured once a process for the same model, sizes and precision.

    Raises:
        ConfigError: if there is no model to measure, or its layers are not those of the file.
    """
    if model is None:
        raise ConfigError("cost=profiled measures the layers of a model; choose one, as in model=mid_gpt")
    if cost.profile is not None:
        times = read_profile(Path(cost.profile))
        if times.num_layers != model.num_layers:
            raise ConfigError(
                f"cost.profile={cost.profile} is of {times.num_layers} layers, model={model.name} has "
                f"{model.num_layers}; leave cost.profile null to measure this one"
            )
        return times
    if cost.microbatches_per_device < 1:
        raise ConfigError(f"cost.microbatches_per_device={cost.microbatches_per_device}: at least 1 is measured")
    sequences = int(config.workload["microbatch_sequences"])
    # More threads than cores would only wait for each other.
    threads = min(config.num_devices, os.cpu_count() or 1)
    return _measured(model, sequences, config.dtype, config.seed, threads, cost.microbatches_per_device)


@cache
def _measured(
    model: Model, sequences: int, dtype: str, seed: int, num_devices: int, microbatches_per_device: int
) -> LayerTimes:
    from rpbench.engine.measure.layer_times import time_layers
    from rpbench.engine.training import Settings
    from rpbench.harness.train import one_thread, workload_of

    with one_thread():
        workload = workload_of(model, sequences, dtype, seed, num_microbatches=1)
        return time_layers(workload, Settings(), num_devices, microbatches_per_device)
