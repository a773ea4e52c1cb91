"""Sweeps: what became of the cells of every sweep of a folder, and how fast they end."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rpbench.records.manifest import PLANNED, Manifest, ManifestError, manifest_names, read_manifest

RECENT_S = 600.0  # of the pace


def read_sweeps(results: Path, stamps: Mapping[str, float], now: float) -> list[dict[str, Any]]:
    """A line for each sweep that can be read.

    Args:
        stamps: when each record was written, by its name.
        now: on the same clock, in seconds.
    """
    found = []
    for name in manifest_names(results):
        try:
            manifest = read_manifest(results, name)
        except ManifestError:
            continue
        if manifest is not None:
            found.append(_line(manifest, stamps, now))
    return found


def _line(manifest: Manifest, stamps: Mapping[str, float], now: float) -> dict[str, Any]:
    runs = [run for cell in manifest.cells for run in cell.run_ids]
    recent = sorted(stamps[run] for run in runs if now - stamps.get(run, 0.0) < RECENT_S)
    left = manifest.counts[PLANNED]
    # Between n ends lie n - 1 runs; the last one that is under way is not counted.
    pace = (len(recent) - 1) / (recent[-1] - recent[0]) if len(recent) > 1 and recent[-1] > recent[0] else None
    return {
        "name": manifest.name,
        "command": manifest.command,
        "states": {state: number for state, number in manifest.counts.items() if number},
        "cells": len(manifest.cells),
        "runs": runs,
        "runs_per_minute": None if pace is None else 60 * pace,
        "left_s": left / pace if pace and left else None,
    }
