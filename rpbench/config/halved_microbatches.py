"""Halved microbatches: schedules that order pieces of the microbatches that a run asks for.

With backward halving (`baselines/bidirectional/chimera.py`) a forward takes a whole microbatch and a backward half of
one. The pieces are then the microbatches of the schedule: a forward is one action with both of them. So a run of N
microbatches of 2b sequences becomes one of 2N microbatches of b sequences, once, when the request is made; what is
behind it counts pieces, and the record says what was asked for. The tokens of a step stay the same.
"""

from dataclasses import replace

from rpbench.config.choices import ConfigError, Mode, Simulate, Train, WorkloadConfig
from rpbench.config.files.source_file import SourceFile
from rpbench.registry import Entry


def cut_sequences(workload: WorkloadConfig, pieces: int) -> WorkloadConfig:
    """The workload with as many sequences as a piece has.

    Raises:
        ConfigError: if a microbatch has no such number of them.
    """
    sequences, rest = divmod(workload.microbatch_sequences, pieces)
    if rest:
        raise ConfigError(
            f"workload.microbatch_sequences={workload.microbatch_sequences}: a microbatch is cut into {pieces} equal "
            f"pieces; take a multiple of {pieces}"
        )
    return replace(workload, microbatch_sequences=sequences)


def check_pieces(
    entry: Entry, mode: Mode, file: SourceFile | None, tuning_budget: int | None, profile: str | None
) -> None:
    """Refuse what counts microbatches by itself: modes, files, searches and measured times.

    Raises:
        ConfigError: naming what to leave out.
    """
    named = " ".join(f"schedule.{key}={str(value).lower()}" for key, value in (entry.halved or {}).items())
    if not isinstance(mode, Simulate | Train):
        raise ConfigError(f"{named} with mode={mode.name}: it has its own microbatches; leave one of both out")
    if file is not None:
        raise ConfigError(f"{named} with schedule_file={file.path}: the file says its microbatches; leave one out")
    if tuning_budget is not None:
        raise ConfigError(
            f"{named} with tuning_budget={tuning_budget}: the search chooses the size of microbatches; "
            "leave one of both out"
        )
    if profile is not None:
        raise ConfigError(
            f"{named} with cost.profile={profile}: it says nothing of the size of its microbatches; "
            "measure pieces by leaving it out"
        )
