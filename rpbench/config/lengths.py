"""Lengths: tokens of every sequence of a step, where they differ; a microbatch takes `microbatch_sequences` in turn."""

import re
from collections.abc import Mapping
from typing import Any

from rpbench.config.choices import BackendConfig, ConfigError, Mode, Simulate, Train, WorkloadConfig
from rpbench.config.files.source_file import read_source
from rpbench.workload.architecture import Architecture

_BACKENDS = ("virtual", "cpu", "emulated")


def read_lengths(given: Any, model: Architecture | None) -> list[int] | None:
    """The lengths of a list, or of a text file of numbers with white space or commas between; None if all are the same
    as the model's, or, without one, as each other's.

    Raises:
        ConfigError: if a file cannot be read, or something is no length that the model has positions for.
    """
    file, words, where = None, given, f"workload.lengths={given!r:.60}"
    if isinstance(given, str):
        file = read_source("workload.lengths", given)
        assert file is not None
        words, where = re.split(r"[\s,]+", file.text.strip()), f"workload.lengths={given}"
    if not isinstance(words, list) or not words or words == [""]:
        raise ConfigError(f"{where}: no lengths; give a list such as [512,128,64], or a file with one a line")
    found = []
    for place, word in enumerate(words, 1):
        if not re.fullmatch(r"\d{1,9}", str(word)) or not int(word):
            raise ConfigError(
                f"{where}: number {place} is {word!r:.40}; a length is a whole number of tokens, 1 or more"
            )
        found.append(int(word))
        if model is not None and int(word) > model.seq_len:
            raise ConfigError(
                f"{where}: number {place} is {word}, more than model.seq_len={model.seq_len} has positions for; cut "
                f"that sequence, or set model.seq_len={max(int(other) for other in words if str(other).isdigit())}"
            )
    return None if set(found) == {model.seq_len if model else found[0]} else found


def check_lengths(
    workload: WorkloadConfig,
    num_microbatches: int,
    mode: Mode,
    backend: BackendConfig | None,
    others: Mapping[str, object],
) -> None:
    """Refuse lengths of another number of sequences, and what has microbatches of one size alone.

    Args:
        others: choices that go with no lengths, by their words; nothing, where they were not made.

    Raises:
        ConfigError: with the number that is needed, or what to leave out.
    """
    if workload.lengths is None:
        return
    needed, sequences = num_microbatches * workload.microbatch_sequences, workload.microbatch_sequences
    if len(workload.lengths) != needed:
        raise ConfigError(
            f"workload.lengths: {len(workload.lengths)} of them, and a step has {needed} sequences: num_microbatches="
            f"{num_microbatches} times workload.microbatch_sequences={sequences}; give one for each, or change one of "
            "both"
        )
    refused = [what for what, is_made in others.items() if is_made]
    if not isinstance(mode, Simulate | Train):
        refused.append(f"mode={mode.name}")
    if backend is not None and backend.name not in _BACKENDS:
        refused.append(f"backend={backend.name}")
    if workload.held_out:
        refused.append(f"workload.held_out={workload.held_out}")
    if refused:
        raise ConfigError(
            f"workload.lengths with {refused[0]}: microbatches of unequal lengths are simulated for one schedule on "
            f"one host, and trained on backend={' or '.join(_BACKENDS)}; leave one of both out"
        )
