"""Sizes of a request: limits for all modes, pieces of microbatches, and sequences of unequal lengths.

With backward halving (`baselines/bidirectional/chimera.py`) a forward takes a whole microbatch and a backward half of
one. The halves are then the microbatches of the schedule: a forward is one action with both of them. So when the
request is made, a run of N microbatches of 2b sequences becomes one of 2N microbatches of b sequences; later code
counts pieces, and the record says what was requested. The tokens of a step stay the same.

Where lengths differ, each microbatch takes the next `microbatch_sequences` of them.
"""

import math
import os
import re
from dataclasses import replace
from typing import Any

from rpbench.config.choices import WorkloadConfig, at_least_one, check
from rpbench.config.configuration import RunConfig
from rpbench.config.errors import ConfigError, config_errors
from rpbench.config.files import read_source
from rpbench.ir.partition import MOST_LAYERS
from rpbench.passes.recomputation import RECOMPUTES
from rpbench.workload.architecture import Architecture

DTYPES = ("float64", "float32", "bfloat16", "float16")
_LARGEST = 10**6
_MOST_FORWARDS = 2**22
_BYTES_PER_FORWARD = 2000  # of a table that is checked and simulated; 900 to 2,800 were measured, by schedule
_MOST_PLACES = 2**28  # stages x devices: tables over every pair take a byte each


def num_layers(config: RunConfig) -> int | None:
    """The requested number of layers, None for that of the model; ConfigError for an impossible one."""
    if config.model.get("name") == "abstract" and (added := config.model.keys() - {"name", "num_layers"}):
        raise ConfigError(
            f"model.{min(added)} with model=abstract, which has no shape: choose a model, as in model=transformer"
        )
    given = config.model.get("num_layers")
    if given is not None and (type(given) is not int or not 1 <= given <= MOST_LAYERS):
        raise ConfigError(f"model.num_layers={given!r:.60}: a whole number from 1 to {MOST_LAYERS:,}")
    return given


def check_sizes(config: RunConfig, num_ranks: int) -> None:
    """Refuse numbers that no table in memory holds, and unknown words; `num_ranks` are the rows of the schedule."""
    at_least_one(config, "", "num_devices", "num_microbatches", "num_steps", "chunks_per_device", "tuning_budget")
    for name in ("num_devices", "num_microbatches", "num_steps", "chunks_per_device", "tuning_budget", "prefetch"):
        if (getattr(config, name) or 1) > _LARGEST:
            given = f"{name}={getattr(config, name)!s:.40}"
            raise ConfigError(f"{given}: at most {_LARGEST:,}; a schedule is a table in memory")
    _check_table(config, num_ranks)
    check(config, "", f"one of {', '.join(DTYPES)}", DTYPES.__contains__, "dtype")
    if not config.results_dir:
        raise ConfigError("results_dir=: name a folder, as in results_dir=results")
    check(config, "", f"one of {', '.join(RECOMPUTES)}", RECOMPUTES.__contains__, "recompute")


def _check_table(config: RunConfig, num_ranks: int) -> None:
    """Refuse a schedule whose table does not fit the free memory."""
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


def cut_sequences(workload: WorkloadConfig, pieces: int) -> WorkloadConfig:
    """The workload with the sequences of a piece; ConfigError if a microbatch cannot be cut equally."""
    sequences, rest = divmod(workload.microbatch_sequences, pieces)
    if rest:
        raise ConfigError(
            f"workload.microbatch_sequences={workload.microbatch_sequences}: a microbatch is cut into {pieces} equal "
            f"pieces; take a multiple of {pieces}"
        )
    return replace(workload, microbatch_sequences=sequences)


_MOST_LENGTH_BYTES = 2**22  # of a file of lengths: a step of a million sequences


def read_lengths(given: Any, model: Architecture | None) -> list[int] | None:
    """The lengths of a list, or of a text file of numbers separated by white space or commas.

    None if all equal the model's, or without a model each other. Raises ConfigError for an unreadable file, or a length
    that the model has no positions for.
    """
    words, where = given, f"workload.lengths={given!r:.60}"
    if isinstance(given, str):
        where = f"workload.lengths={given}"
        file = read_source("workload.lengths", given, most=_MOST_LENGTH_BYTES)
        assert file is not None
        with config_errors(f"{where}: "):
            words = re.split(r"[\s,]+", file.text.strip())
    if not isinstance(words, list) or not words or words == [""]:
        raise ConfigError(f"{where}: no lengths; give a list such as [512,128,64], or a file with one a line")
    found = []
    for place, word in enumerate(words, 1):
        if not re.fullmatch(r"\d{1,9}", str(word)) or not int(word):
            raise ConfigError(
                f"{where}: number {place} is {word!r:.40}; a length is a whole number of tokens, 1 or more"
            )
        found.append(int(word))
    beyond = next((place for place, length in enumerate(found, 1) if model and length > model.seq_len), None)
    if model is not None and beyond is not None:
        raise ConfigError(
            f"{where}: number {beyond} is {found[beyond - 1]}, more than model.seq_len={model.seq_len} has positions "
            f"for; cut that sequence, or set model.seq_len={max(found)}"
        )
    return None if set(found) == {model.seq_len if model else found[0]} else found
