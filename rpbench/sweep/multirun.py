"""Runs under Hydra, one configuration or a multirun with any launcher, with the command line's errors and statuses."""

import fcntl
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TextIO, cast

from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import HydraException
from hydra.types import HydraContext, RunMode
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rpbench.config import configuration
from rpbench.config.choices import ConfigError, first_line
from rpbench.config.loading import load, request_of
from rpbench.cost.hardware.machine import devices_named
from rpbench.places import CONF, ORDERS
from rpbench.records.manifest import STATES, Journal, Plan
from rpbench.registry import unknown_name
from rpbench.run.recording import emit, run
from rpbench.sweep.slurm import Slurm, asked_for, refuse_without_slurm
from rpbench.sweep.sweeper import ManifestSweeper
from rpbench.sweep.worker import RunFailed, Terms, Worker

# Lock of the machine: runs that measure time run alone. It ends with the process that holds it. The file is in the
# folder of temporary files; RPBENCH_MACHINE_LOCK names another, where several users share a machine.
_POLL_S = 0.2
_held = 0  # how often this process holds it: a run may start another


def _path() -> Path:
    default = Path(tempfile.gettempdir()) / f"rpbench-{os.getuid()}.lock"
    return Path(os.environ.get("RPBENCH_MACHINE_LOCK", default))


@contextmanager
def machine_alone(*, wanted: bool) -> Iterator[None]:
    """Have the machine alone inside, if `wanted`; other runs that measure wait."""
    global _held
    if not wanted or _held:
        yield
        return
    with os.fdopen(os.open(_path(), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600), "r+") as file:
        if not _taken(file):
            yield  # another rank of this run has it for all ranks
            return
        _held += 1
        try:
            yield
        finally:
            _held -= 1


def _taken(file: TextIO) -> bool:
    """Wait for the lock; False if another rank of the same run has it, which would wait for this rank."""
    is_said = False
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            if file.read() == _run() != "":
                return False
            if not is_said:
                words = f"rpbench: another run measures time on this machine; waiting for its end ({_path()})"
                print(words, file=sys.stderr)
            is_said = True
            time.sleep(_POLL_S)
        else:
            file.seek(0)
            file.truncate()
            file.write(_run())
            file.flush()
            return True


def _run() -> str:
    """A name that all ranks of one launch share; empty for a run of one process."""
    names = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")
    return " ".join(os.environ.get(name, "") for name in names) if "RANK" in os.environ else ""


# Flags of a sweep, between its overrides: --only STATES, --retry STATES, --fail-fast, --dry-run.


def split_terms(arguments: Sequence[str]) -> tuple[list[str], Terms, bool]:
    """Overrides, the terms of the sweep, and whether it is a dry run; ConfigError for an unknown state."""
    rest: list[str] = []
    states: dict[str, frozenset[str]] = {"--only": frozenset(), "--retry": frozenset()}
    waiting = list(arguments)
    while waiting:
        item = waiting.pop(0)
        flag, equals, value = item.partition("=")
        if flag not in states:
            rest.append(item)
            continue
        states[flag] |= _states(flag, value if equals else (waiting.pop(0) if waiting else ""))
    terms = Terms(states["--only"], states["--retry"], "--fail-fast" in rest)
    return [item for item in rest if item not in ("--fail-fast", "--dry-run")], terms, "--dry-run" in rest


def _states(flag: str, text: str) -> frozenset[str]:
    found = frozenset(word.strip().replace("_", " ") for word in text.split(","))
    for word in found - set(STATES):
        raise ConfigError(f"{flag} {word or '...'}: states of cells are {', '.join(STATES)}")
    return found


_MULTIRUN = ("-m", "--multirun")
_LAUNCHER = ("hydra/launcher", "hydra.launcher")


def sweep(arguments: Sequence[str]) -> int:
    """Run a command line; 0 if every run ended, 1 if one failed. Raises ConfigError for a wrong request.

    All runs of a multirun are tried; the worst decides.
    """
    overrides, terms, is_dry = split_terms(configuration.quoted([item for item in arguments if item not in _MULTIRUN]))
    if flag := next((item for item in overrides if item.startswith("-")), None):
        raise ConfigError(f"unknown option {flag}: runs take key=value, and -m for a sweep; see rpbench --help")
    configuration.refuse_old_spellings(overrides)
    _check_choices(overrides)
    try:
        if any(item in _MULTIRUN for item in arguments):
            if "backend=torch" in overrides and int(os.environ.get("WORLD_SIZE", "1")) > 1:
                raise ConfigError(
                    "-m under torchrun: every rank would sweep for itself; leave torchrun out, so that each run starts "
                    "its ranks, or start torchrun once for each run"
                )
            _multirun(overrides, terms, is_dry=is_dry)
        elif is_dry or terms != Terms():
            raise ConfigError("--dry-run, --only, --retry and --fail-fast are of sweeps: put -m before the overrides")
        else:
            request = load(overrides)
            if words := [item for item in overrides if item.lstrip("+~").startswith(_LAUNCHER)]:
                raise ConfigError(f"{words[0]}: a launcher is of sweeps: put -m before the overrides, or leave it out")
            _tell_of_sweep(request.choices["experiment"], overrides)
            _carry_out(request, Journal(), alone=True)
    except RunFailed as error:
        print(f"rpbench: {error}", file=sys.stderr)
        return 1
    return 0


def _tell_of_sweep(experiment: str | None, overrides: Sequence[str]) -> None:
    """Say that a single run of an experiment is none of its cells where it leaves out what the experiment sweeps."""
    if experiment is not None and (keys := configuration.not_swept(experiment, overrides)):
        print(
            f"rpbench: experiment={experiment} is a sweep over {', '.join(keys)}, and without -m this is one run with "
            "their defaults; put -m before the words for all of its cells",
            file=sys.stderr,
        )


def _carry_out(request: Any, journal: Journal, slurm: Slurm | None = None, *, alone: bool = False) -> None:
    """Run a request, here or by `slurm`; print its records and write its end to the journal.

    Raises ConfigError if the request is wrong, RunFailed if a correct run broke.
    """
    try:
        with machine_alone(wanted=request.measures and slurm is None):
            rows = run(request) if slurm is None else slurm.run(request)
    except (ValueError, RunFailed):
        raise
    except Exception as error:
        raise RunFailed(f"run failed: {type(error).__name__}: {error}") from error
    for row in rows:
        emit(row, alone=alone)
    if rows:  # none on ranks that torchrun has started beside rank 0
        journal.ended(rows)
    failed = [row for row in rows if row["status"] == "failed"]
    if failed:
        which = "; ".join(f"{row['run_id']}: {row['reason']}" for row in failed)
        raise RunFailed(f"run failed: {which} (events.jsonl in its folder holds what is known)")


def _multirun(overrides: Sequence[str], terms: Terms, *, is_dry: bool) -> None:
    """Run all combinations of the swept values by Hydra's launcher; raises the first error of a cell."""
    configuration.register(overrides)
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(CONF), version_base="1.3", job_name="rpbench"):
            hydra = GlobalHydra.instance().hydra
            assert hydra is not None
            with configuration.in_our_words(overrides):
                config = hydra.compose_config("config", [*overrides], RunMode.MULTIRUN, with_log_configuration=False)
            if config.hydra.callbacks and not any("callbacks" in item for item in overrides):
                raise ConfigError("hydra.callbacks: they run code; name them by hydra/callbacks=NAME, and in no file")
            context = HydraContext(config_loader=hydra.config_loader, callbacks=cast(Any, _Callbacks(config)))
            _sweep_with(config, context, terms, is_dry=is_dry)
    except (HydraException, OmegaConfBaseException) as error:
        raise configuration.explained(error, overrides) from None
    except (ValueError, OSError, RunFailed):
        raise
    except Exception as error:  # outside of any run, such as a killed worker
        what = f"{type(error).__name__}: {first_line(error)}"
        killed = "Terminated" in what or "BrokenProcess" in what
        broke = "a worker of the launcher was killed" if killed else "the sweep broke"
        raise RunFailed(f"{broke} ({what}); what had ended is kept, the same command goes on") from error


def _sweep_with(config: DictConfig, context: HydraContext, terms: Terms, *, is_dry: bool) -> None:
    """Run our own sweeper instead of Hydra's default, or another that was chosen."""
    _check_hydra(config)
    arguments, plugins = list(config.hydra.overrides.task), Plugins.instance()
    if config.hydra.runtime.choices["hydra/sweeper"] != "basic":  # Hydra's default
        plugins.instantiate_sweeper(hydra_context=context, task_function=_job, config=config).sweep(arguments)
        return

    launcher = cast(dict[str, Any], OmegaConf.to_container(config.hydra.launcher, resolve=True))
    slurm = asked_for(launcher)

    def launch(work: Callable[[DictConfig], None]) -> Any:
        if slurm is not None:
            return _Here(work, config)
        return plugins.instantiate_launcher(hydra_context=context, task_function=work, config=config)

    sweeper = ManifestSweeper(config, launch, context.config_loader, terms)
    if is_dry:
        sweeper.preview(arguments, sys.stdout)
    else:
        refuse_without_slurm(launcher)
        if slurm is not None:
            slurm.executor_here()
        sweeper.sweep(arguments, _work if slurm is None else partial(_work_by_jobs, slurm))


def _check_hydra(config: DictConfig) -> None:
    """Refuse options of Hydra that leave it without launcher or sweeper, or move the working folder."""
    for name in ("launcher", "sweeper"):
        found = config.hydra[name]
        if not OmegaConf.is_dict(found) or not found.get("_target_"):
            raise ConfigError(f"hydra.{name}={found}: it is chosen by its name, as in hydra/{name}=basic")
    if config.hydra.launcher.get("n_jobs") == 0:
        raise ConfigError("hydra.launcher.n_jobs=0: so many workers run the cells; leave it out for one on each core")
    if not (isinstance(config.hydra.verbose, bool | str) or OmegaConf.is_list(config.hydra.verbose)):
        raise ConfigError(f"hydra.verbose={config.hydra.verbose}: true, false, or the names of loggers")
    if config.hydra.job.chdir:
        raise ConfigError("hydra.job.chdir=true: cells write beside where the command was given; leave it out")


class _Callbacks:
    """Callbacks chosen by hydra/callbacks=NAME, called at the start and the end of each job."""

    def __init__(self, config: DictConfig) -> None:
        self._callbacks = [instantiate(each) for each in (config.hydra.callbacks or {}).values()]

    def on_job_start(self, **values: Any) -> None:
        self._call("on_job_start", self._callbacks, values)

    def on_job_end(self, **values: Any) -> None:
        self._call("on_job_end", self._callbacks[::-1], values)

    def _call(self, event: str, callbacks: Sequence[Any], values: dict[str, Any]) -> None:
        for each in callbacks:
            try:
                getattr(each, event)(**values)
            except Exception as error:  # a failing callback of the user must not stop the runs
                warnings.warn(f"{type(each).__name__}.{event}: {type(error).__name__}: {error}", stacklevel=2)


class _Here:
    """A launcher of one worker in this process, which submits the cells as jobs."""

    def __init__(self, work: Callable[[DictConfig], None], config: DictConfig) -> None:
        self._work, self._config = work, config

    def launch(self, batch: Sequence[Sequence[str]], initial_job_idx: int) -> list[JobReturn]:
        self._work(self._config)
        return [JobReturn(status=JobStatus.COMPLETED)]


def _work(plan: Plan, cells: Mapping[int, Sequence[str]], terms: Terms, node: DictConfig) -> None:
    """The work of one worker, in the process that the launcher started."""
    job = cast(DictConfig, HydraConfig.get())
    Worker(Path(job.sweep.dir), plan, cells, terms, _carry_out, configuration.composed_of(node, job)).work()


def _work_by_jobs(
    slurm: Slurm, plan: Plan, cells: Mapping[int, Sequence[str]], terms: Terms, config: DictConfig
) -> None:
    Worker(Path(config.hydra.sweep.dir), plan, cells, terms, partial(_carry_out, slurm=slurm)).work()


def _job(node: DictConfig) -> None:
    """One run for a sweeper that is not ours."""
    job = cast(DictConfig, HydraConfig.get())
    _carry_out(request_of(configuration.composed_of(node, job)), Journal())


def _check_choices(overrides: Sequence[str]) -> None:
    """Refuse unknown options of a group before the first run of a sweep begins."""
    for item in overrides:
        group, equals, value = item.lstrip("+").partition("=")
        for name in value.split(",") if equals and group in configuration.GROUPS else ():
            known, option = configuration.options_of(group), name.strip()
            if group == "cluster" and name not in known and devices_named(name) is not None:
                continue
            if group == "schedule" and option.endswith(ORDERS):
                continue  # a file, which its run reads
            if option not in (*known, "null", "") and not option.startswith(("$", "glob", "choice")):
                if group == "model" and ("/" in option or option.endswith(".json")):
                    raise ConfigError(
                        f"model={option}: a run takes a model of conf/model. A config.json is for advise, and for plan "
                        f"mesh=search, which print runs: python -m rpbench advise model={option} gpu=..."
                    )
                raise ConfigError(unknown_name(group, option, known))
