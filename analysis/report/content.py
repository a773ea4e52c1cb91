"""Content of a report (records, verdicts, exhibits, figures) and the links between its pages."""

import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from analysis.claims.claim import Verdict
from analysis.exhibits.exhibit import Exhibit
from analysis.report.images import Image

ALONE = "single runs"  # records that no sweep names


def slug(words: str) -> str:
    """A part of a file name: `Figure 17: the bubbles` becomes `figure-17-the-bubbles`."""
    return re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")


@dataclass(frozen=True)
class Site:
    """The links of a report, relative to one of its pages."""

    # front, folder: names of the first page and of the folder of the others beside it
    front: str
    folder: str
    section_of: Mapping[str, str] = field(default_factory=dict)  # heading by claim id
    sweep_of: Mapping[str, str] = field(default_factory=dict)  # sweep by record id
    on_front: bool = False  # whether the links are on the first page
    figures: str = "figures"  # folder of the figures, relative to the first page

    def page(self, name: str) -> str:
        return f"{self.folder}/{name}.html" if self.on_front else f"{name}.html"

    def home(self) -> str:
        return self.front if self.on_front else f"../{self.front}"

    def figure(self, name: str) -> str:
        path = f"{self.figures}/{name}"
        return quote(path if self.on_front else posixpath.relpath(path, self.folder))

    def exhibit(self, name: str) -> str:
        return self.page(f"exhibit-{slug(name)}")

    def claims(self, section: str) -> str:
        return self.page(f"claims-{slug(section)}")

    def claim(self, name: str) -> str:
        return f"{self.claims(self.section_of[name])}#claim-{name}" if name in self.section_of else self.page("claims")

    def statements(self, **chosen: str) -> str:
        """The list of statements, filtered as by its form."""
        return f"{self.page('claims')}#{urlencode(chosen, quote_via=quote)}"

    def records(self, sweep: str) -> str:
        return self.page(f"records-{slug(sweep)}")

    def run(self, run_id: str) -> str:
        return f"{self.records(self.sweep_of.get(run_id, ALONE))}#run-{run_id}"

    def source(self, anchor: str) -> str:
        return f"{self.page('sources')}#{anchor}"


@dataclass
class Content:
    rows: list[dict[str, Any]]  # the records that manifests of the folder name
    verdicts: list[Verdict]
    exhibits: list[Exhibit]
    missing: list[tuple[str, str]]  # (id, reason) of exhibits that could not be made
    scope: str = "full"  # what was run, such as `full` or `quick`
    # the files of every figure by its stem, in the folder `figures`
    images: dict[str, Image] = field(default_factory=dict)
    figures: Path = Path("figures")
    own: list[Exhibit] = field(default_factory=list)  # comparisons of the user's own sweeps
    sweep_of: dict[str, str] = field(default_factory=dict)  # sweep by record id

    @property
    def reproduces(self) -> bool:
        return bool(self.verdicts)

    @property
    def shown(self) -> list[Exhibit]:
        return [*self.exhibits, *self.own]
