"""Content of a report: records, verdicts, exhibits and their figures; and where on its pages each of them stands."""

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
    """Words as a part of a file name: `Figure 17: the bubbles` becomes `figure-17-the-bubbles`."""
    return re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")


@dataclass(frozen=True)
class Site:
    """The links of a report, as they are written on one of its pages.

    Args:
        front: name of the first page.
        folder: name of the folder of the other pages, beside the first.
        section_of: heading by the id of a claim.
        sweep_of: name of the sweep by the id of a record.
        on_front: whether the links are written on the first page.
        figures: path of the folder of the figures, from where the first page is.
    """

    front: str
    folder: str
    section_of: Mapping[str, str] = field(default_factory=dict)
    sweep_of: Mapping[str, str] = field(default_factory=dict)
    on_front: bool = False
    figures: str = "figures"

    def page(self, name: str) -> str:
        """A page of the folder, by its name without `.html`."""
        return f"{self.folder}/{name}.html" if self.on_front else f"{name}.html"

    def home(self) -> str:
        """The first page."""
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
        """The list of statements, narrowed down as its form does it."""
        return f"{self.page('claims')}#{urlencode(chosen, quote_via=quote)}"

    def records(self, sweep: str) -> str:
        return self.page(f"records-{slug(sweep)}")

    def run(self, run_id: str) -> str:
        return f"{self.records(self.sweep_of.get(run_id, ALONE))}#run-{run_id}"

    def source(self, anchor: str) -> str:
        return f"{self.page('sources')}#{anchor}"


@dataclass
class Content:
    """The content of a report.

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
        return bool(self.verdicts)

    @property
    def shown(self) -> list[Exhibit]:
        return [*self.exhibits, *self.own]
