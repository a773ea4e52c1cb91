"""`python -m tests.fuzzing --minutes 60 --seed 1`: bend and read until the time is over."""

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from analysis.verbs import VERBS
from rpbench.cli import register

from .bending import bent
from .documents import Documents, documents
from .guard import Finding, Guard
from .readers import Reader, readers

register(VERBS)


def prepared(folder: Path) -> tuple[list[Reader], Documents]:
    """The readers, and the documents they read."""
    (folder / "seeds").mkdir()
    seeds = documents(folder / "seeds")
    return readers(seeds), seeds


def bent_for(reader: Reader, seeds: Documents, chance: random.Random) -> bytes:
    """A document for a reader, bent; one in thirty is sound."""
    known = seeds[reader.documents]
    document, other = chance.choice(known), chance.choice(known)
    return document if chance.random() < 1 / 30 else bent(document, reader.form, chance, other)


class Campaign:
    """Readers that take turns by time: whoever has had least is next."""

    def __init__(self, chosen: list[Reader], seeds: Documents, guard: Guard, seed: int) -> None:
        self.readers, self.tries, self.seconds = chosen, Counter[str](), Counter[str]()
        self._seeds, self._guard, self._chance = seeds, guard, random.Random(seed)
        self.findings: dict[tuple[str, str, str], Finding] = {}
        self.times: Counter[tuple[str, str, str]] = Counter()

    def run(self, seconds: float) -> Iterator[Finding]:
        """Findings as they are made, each kind once."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            reader = min(self.readers, key=lambda each: self.seconds[each.name])
            document = bent_for(reader, self._seeds, self._chance)
            began = time.process_time()
            found = self._guard.tried(reader.name, reader.read, document, free=reader.free)
            self.seconds[reader.name] += time.process_time() - began + 1e-4
            self.tries[reader.name] += 1
            if found is None:
                continue
            key = (found.what, found.where, found.words[-200:] if found.where == "?" else "")
            self.times[key] += 1
            if key not in self.findings:
                self.findings[key] = found
                yield found

    def table(self) -> str:
        """A line for each reader: tries, tries a second of processor time, kinds of findings."""
        kinds = Counter(found.reader for found in self.findings.values())
        lines = [f"{'reader':<26}{'tries':>9}{'a second':>10}{'findings':>10}"]
        for reader in self.readers:
            name = reader.name
            pace = self.tries[name] / max(self.seconds[name], 1e-9)
            lines.append(f"{name:<26}{self.tries[name]:>9}{pace:>10.1f}{kinds[name]:>10}")
        lines.append(f"{'all':<26}{sum(self.tries.values()):>9}{'':>10}{len(self.findings):>10}")
        return "\n".join(lines)


def main() -> int:
    """Run a campaign; findings go to stdout as they come, their documents into a folder."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzzing", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="readers whose name holds this")
    parser.add_argument("--keep", type=Path, help="a folder for the documents of findings")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fuzzing-") as name:
        chosen, seeds = prepared(Path(name))
        guard = Guard(Path(name))
        campaign = Campaign([each for each in chosen if asked.only in each.name], seeds, guard, asked.seed)
        began = time.monotonic()
        for number, found in enumerate(campaign.run(60 * asked.minutes)):
            minute = (time.monotonic() - began) / 60
            print(f"\n== {minute:.1f} min  {found.reader}: {found.what} at {found.where}\n{found.words}", flush=True)
            print(f"   of {found.document[:300]!r}", flush=True)
            if asked.keep:
                asked.keep.mkdir(parents=True, exist_ok=True)
                (asked.keep / f"{number:03}-{found.reader.replace(' ', '_')}").write_bytes(found.document)
        print(campaign.table(), flush=True)
        for (what, where, _), times in campaign.times.most_common():
            print(f"{times:>7} x {what} at {where}")
        return 1 if campaign.findings else 0


if __name__ == "__main__":
    sys.exit(main())
