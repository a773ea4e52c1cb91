"""Duels of earlier days, as they were kept: what each of them says of every contender, side by side."""

from collections.abc import Sequence
from pathlib import Path

from analysis.driver import duels
from analysis.driver.duels import Kept
from analysis.exhibits.exhibit import Cell, Shown, Table, exhibited, label, table
from analysis.exhibits.figures.duel import MODELS, NAMES
from analysis.records.experiments import Experiments


@exhibited("five_duels")
def five(experiments: Experiments) -> Shown:
    """All complete duels so far."""
    return Shown(table=side_by_side((*duels.EARLIER, *duels.DUELS)))


@exhibited("aa_duel")
def same(experiments: Experiments) -> Shown:
    """The A/A duel."""
    return Shown(table=side_by_side((duels.SAME,)))


def side_by_side(paths: Sequence[Path]) -> Table:
    """A row a contender, a column for each table that was kept."""
    kept = [(path.name, duels.read(path)) for path in paths]
    began = [min(each.started_at for each in duel.values())[:16].replace("T", " ") for _, duel in kept]
    keys = dict.fromkeys(key for _, duel in kept for key in duel)
    return table(
        ("contender", "model", *began),
        (
            [
                label(NAMES.get(name, name.replace("1f1b_copy_", "1F1B, copy "))),
                label(MODELS.get(model, model)),
                *(_cell(duel.get((model, name)), file) for file, duel in kept),
            ]
            for model, name in keys
        ),
    )


def _cell(kept: Kept | None, file: str) -> Cell:
    if kept is None or not kept.has_interval:
        return label("not in it" if kept is None else f"not measured: {kept.reason}")
    source = f"analysis/kept/{file}, {kept.model} {kept.contender}"
    words = f"{kept.ratio:.3f} ({kept.low:.3f}–{kept.high:.3f}), {kept.verdict}; {kept.plan}"
    return Cell(kept.ratio, words, source=source)
