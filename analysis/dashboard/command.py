"""dashboard: W&B's workspace and report as code, or our own page on loopback."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rpbench.config.choices import ConfigError

_USAGE = "dashboard [results_dir=DIR] [port=N], or dashboard wandb [project=NAME] [entity=NAME] [--dry-run]"


def dashboard(arguments: Sequence[str]) -> int:
    """Serve the page until interrupted, or make what W&B shows; what was made goes to stdout.

    Raises:
        ConfigError: for an argument it does not take.
    """
    words, options = _parsed(arguments)
    if "wandb" in words:
        return _wandb(options, dry_run="--dry-run" in words)
    from analysis.dashboard.server import serve

    results = Path(options.pop("results_dir", "results"))
    port = _port(options.pop("port", "0"))
    _refuse(options)
    if results.exists() and not results.is_dir():
        raise ConfigError(f"results_dir={results}: it is no folder; name the one that holds records, or will")
    with serve(results, port) as server:
        print(json.dumps({"dashboard": server.url}), flush=True)
        print("rpbench: the page follows the folder; Ctrl-C ends it", file=sys.stderr)
        server.wait()
    return 0


def _wandb(options: dict[str, str], *, dry_run: bool) -> int:
    from rpbench.tracking import dashboard_wandb

    project, entity = options.pop("project", "rpbench"), options.pop("entity", "")
    _refuse(options)
    make = dashboard_wandb.specification if dry_run else dashboard_wandb.save
    print(json.dumps(make(project, entity)))
    return 0


def _parsed(arguments: Sequence[str]) -> tuple[set[str], dict[str, str]]:
    words = {item for item in arguments if "=" not in item}
    for word in words - {"wandb", "--dry-run"}:
        raise ConfigError(f"unknown word {word!r}: {_USAGE}")
    if "--dry-run" in words and "wandb" not in words:
        raise ConfigError(f"--dry-run belongs to dashboard wandb: {_USAGE}")
    return words, dict(item.partition("=")[::2] for item in arguments if "=" in item)


def _port(text: str) -> int:
    if not text.isdigit() or int(text) > 65535:
        raise ConfigError(f"port={text}: a whole number up to 65535; 0 takes a free one")
    return int(text)


def _refuse(options: dict[str, str]) -> None:
    for key in options:
        raise ConfigError(f"dashboard takes no {key}: {_USAGE}")
