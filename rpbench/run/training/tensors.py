"""Tensors of a run: precisions, the text, the optimizer, and whether they fit the host's memory."""

import os
from pathlib import Path

import torch

from rpbench.config.choices import BackendConfig, ConfigError, OptimizerConfig
from rpbench.config.request import Request
from rpbench.engine.state.loss_scale import LossScaling
from rpbench.engine.state.updates.optimizer import OptimizerSettings
from rpbench.engine.state.weights import master_dtype
from rpbench.models.data import TEXTS
from rpbench.workload.architecture import Architecture

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def backend_of(request: Request) -> BackendConfig:
    """The backend of a request that trains."""
    assert request.backend is not None  # as checked when the request was made
    return request.backend


def text_of(request: Request) -> Path | None:
    """The text file to train on; None for synthetic tokens."""
    workload = request.workload
    if workload.text is not None:
        return TEXTS / f"{workload.text}.txt"
    if workload.name != "text":
        return None
    if workload.path is None:
        raise ConfigError("workload=text reads a file: name it by workload.path=FILE")
    return Path(workload.path)


def check_host_memory(model: Architecture, dtype: torch.dtype, num_copies: int = 1) -> None:
    """Refuse a model whose weights and optimizer state do not fit the host; activations are not counted."""
    size, master = dtype.itemsize, master_dtype(dtype).itemsize
    # The module's own weights; two versions, a gradient; a master and Adam's two moments.
    needed = model.total_parameters * size + num_copies * model.trainable_parameters * (3 * size + 3 * master)
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    if needed > there:
        raise ConfigError(
            f"model={model.name} needs {needed / 1e9:.0f} GB of host memory for weights, gradients and optimizer "
            f"state in {str(dtype).removeprefix('torch.')}; {there / 1e9:.0f} GB are free. "
            "Take a smaller model, or mode=simulate"
        )


def optimizer_settings(asked: OptimizerConfig, loss_scaling: LossScaling | None = None) -> OptimizerSettings:
    return OptimizerSettings(
        asked.learning_rate,
        asked.weight_decay,
        asked.num_warmup_steps,
        asked.clip_norm,
        name=asked.name,
        momentum=asked.momentum,
        loss_scaling=loss_scaling,
    )
