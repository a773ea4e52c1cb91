"""What a report shows: records, verdicts, exhibits and their figures."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from analysis.claims.claim import Verdict
from analysis.exhibits.exhibit import Exhibit
from analysis.report.images import Image


@dataclass
class Content:
    """What a report shows.

    Args:
        rows: the records that manifests of the folder name, as they stand in their files.
        missing: exhibits that could not be made, and why.
        scope: what was run, in a word: `full`, `quick`.
        images: the files of every figure by its stem.
        figures: the folder that they are in.
        own: comparisons of sweeps that no exhibit of ours is about.
        sweep_of: name of the sweep by the id of a record.
    """

    rows: list[dict[str, Any]]
    verdicts: list[Verdict]
    exhibits: list[Exhibit]
    missing: list[tuple[str, str]]
    scope: str = "full"
    images: dict[str, Image] = field(default_factory=dict)
    figures: Path = Path("figures")
    own: list[Exhibit] = field(default_factory=list)
    sweep_of: dict[str, str] = field(default_factory=dict)

    @property
    def reproduces(self) -> bool:
        """Whether the paper's claims have a word in it."""
        return bool(self.verdicts)

    @property
    def shown(self) -> list[Exhibit]:
        """Every exhibit that gets a page."""
        return [*self.exhibits, *self.own]
