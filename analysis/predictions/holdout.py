"""Errors of cells that took no part in any fit: a whole model, system or machine is left out.

For each constant that is fitted, all cells that inform it are known; leaving something out fits it on the others.
The A800 takes part in no fit at all: every cell of it is held out, and its errors are known once it is measured.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import MappingProxyType

from analysis.predictions.compare import Cell, declared, error, published_value, with_values
from analysis.predictions.refit import fit
from analysis.records.paper import PUBLISHED_MODELS
from rpbench.cost.basis import Basis

# The throughput cells that inform a constant; several other systems rest on each.
INFORMATIVE: Mapping[str, tuple[Cell, ...]] = MappingProxyType(
    {
        "host_bytes_per_s": tuple(
            Cell("throughput", "roundpipe-sync", model) for model in ("qwen3_1p7b", "llama31_8b", "qwen3_32b")
        ),
        "expert_pass_s": tuple(Cell("throughput", "roundpipe", model) for model in ("gpt_oss_20b", "qwen3_235b_lora")),
        "collective_bytes_per_s": tuple(
            Cell("throughput", system, model)
            for system in ("megatron-tp", "fsdp", "zero-2", "zero-infinity")
            for model in PUBLISHED_MODELS
        ),
    }
)


def without(leaves_out: Callable[[Cell], bool]) -> tuple[Basis, list[str]]:
    """The constants fitted on every informative cell but those left out, and those that nothing left can tell."""
    basis = declared()
    found: dict[str, float] = {}
    untold = []
    for name, cells in INFORMATIVE.items():
        kept = tuple(cell for cell in cells if not leaves_out(cell) and published_value(cell)[1])
        value = _fitted(name, kept, tuple(found.items())) if kept else None
        if value is None:
            untold.append(name)
        else:
            found[name] = value
    return with_values(basis, found), untold


@cache
def _fitted(constant: str, kept: tuple[Cell, ...], values: tuple[tuple[str, float], ...]) -> float | None:
    """A constant fitted on some cells with others set; None if no value near the declared one meets them."""
    try:
        return fit(constant, kept, with_values(declared(), dict(values)))
    except ValueError:
        return None


@cache
def held_out(constant: str, model: str) -> float:
    """Error of RoundPipe on a model that one constant was not fitted on."""
    kept = [cell for cell in INFORMATIVE[constant] if cell.model != model]
    basis = declared()
    refitted = with_values(basis, {constant: fit(constant, kept, basis)})
    off = error(Cell("throughput", "roundpipe", model), refitted)
    assert off is not None
    return off


def errors_without(axis: str, name: str, cells: Sequence[Cell]) -> tuple[dict[Cell, float], list[str]]:
    """Errors of the cells of one model or system, everything fitted without them, and what stayed as declared.

    Args:
        axis: `model` or `system`.
    """
    basis, untold = without(lambda cell: getattr(cell, axis) == name)
    own = [cell for cell in cells if getattr(cell, axis) == name]
    return {cell: off for cell in own if (off := error(cell, basis)) is not None}, untold


def rows(cells: Sequence[Cell]) -> list[dict[str, str]]:
    """A row a cell and axis that was held out."""
    found = []
    for axis in ("model", "system"):
        for name in dict.fromkeys(getattr(cell, axis) for cell in cells):
            errors, untold = errors_without(axis, name, cells)
            for cell, off in errors.items():
                found.append(
                    {
                        "held_out": axis,
                        "name": name,
                        "system": cell.system,
                        "model": cell.model,
                        "error": f"{off:.4f}",
                        "kept_constants": ", ".join(untold),
                    }
                )
    return found


def text(cells: Sequence[Cell]) -> str:
    """Errors with each model, then each system, held out."""
    lines = ["everything fitted without the model or system; errors of its own cells"]
    made = rows(cells)
    for axis, name in dict.fromkeys((row["held_out"], row["name"]) for row in made):
        own = [row for row in made if (row["held_out"], row["name"]) == (axis, name)]
        other = "system" if axis == "model" else "model"
        kept = f" (not refitted: {own[0]['kept_constants']})" if own[0]["kept_constants"] else ""
        lines.append(
            f"{axis} {name:16s} " + ", ".join(f"{row[other]} {float(row['error']):+.1%}" for row in own) + kept
        )
    lines.append("machine 8x-a800-80gb-sxm: no cell took part in any fit; not measured here")
    return "\n".join(lines)
