"""Runs under Hydra: one configuration, or a multirun with any launcher.

Hydra composes and launches; this module gives its failures the words and exit statuses of the command line.
"""

import os
import sys
from collections.abc import Sequence

import hydra
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from rpbench.harness.config import CONF, ConfigError, RunConfig, choices, explained, register, typed
from rpbench.registry import unknown_name


class RunFailed(RuntimeError):
    """A run that broke through no fault of the request."""


def sweep(arguments: Sequence[str]) -> int:
    """Run what the arguments ask for; 0 if every run ended, 1 if one failed, 2 if one was wrongly asked for.

    All runs of a multirun are tried; the first that could not be decides the status.
    """
    register()
    _check_choices(arguments)
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra re-raises, and the words below replace its traceback
    flags = [item for item in arguments if item in ("-m", "--multirun")]  # Hydra wants them before the overrides
    program, sys.argv = sys.argv, ["rpbench", *flags, *(item for item in arguments if item not in flags)]
    try:
        hydra.main(config_path=str(CONF), config_name="config", version_base="1.3")(_job)()
    except (HydraException, OmegaConfBaseException) as error:
        raise explained(error, arguments) from None
    except RunFailed as error:
        print(f"rpbench: {error}", file=sys.stderr)
        return 1
    finally:
        sys.argv = program
    return 0


def _job(node: DictConfig) -> None:
    from rpbench.harness.run import emit, run

    config = typed(RunConfig, node)
    try:
        if config.backend["name"] == "duel":
            from rpbench.harness.duel.run import duel

            for row in duel(config):
                emit(row)
        else:
            emit(run(config))
    except ValueError as error:
        raise ConfigError(str(error)) from None
    except Exception as error:
        raise RunFailed(f"run failed: {type(error).__name__}: {error}; its folder holds the traceback") from error


def _check_choices(arguments: Sequence[str]) -> None:
    """Refuse unknown options of a group before the first run of a sweep begins."""
    for item in arguments:
        group, equals, value = item.lstrip("+").partition("=")
        if equals and group in (
            "schedule",
            "model",
            "cluster",
            "workload",
            "cost",
            "backend",
            "tracker",
            "experiment",
        ):
            for name in value.split(","):
                known = choices(group)
                if name.strip() not in (*known, "null", "") and not name.strip().startswith(("$", "glob", "choice")):
                    raise ConfigError(unknown_name(group, name.strip(), known))
