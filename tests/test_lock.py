"""requirements.lock: what set-up installs, at the versions of the constraints, every file with its hash."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "requirements.lock").read_text(encoding="utf-8")
ENTRIES = [
    [part.strip() for part in entry.split("\\\n")]
    for entry in re.split(r"\n(?=[\w])", "\n" + TEXT.split("\n\n")[0].strip())
    if entry.strip() and not entry.strip().startswith("#")
]
LOCKED = [(Requirement(head), hashes) for head, *hashes in ENTRIES]
PYTHONS = ("3.11", "3.12", "3.13")


def _at(python: str, requirements: list[Requirement]) -> dict[str, Requirement]:
    where = {
        "python_version": python,
        "python_full_version": f"{python}.7",
        "sys_platform": "linux",
        "os_name": "posix",
    }
    found = [each for each in requirements if each.marker is None or each.marker.evaluate(where)]
    assert len({canonicalize_name(each.name) for each in found}) == len(found), "a package twice"
    return {canonicalize_name(each.name): each for each in found}


def test_every_entry_is_one_version_with_its_hashes_and_no_place() -> None:
    assert len(LOCKED) > 100
    for requirement, hashes in LOCKED:
        assert [spec.operator for spec in requirement.specifier] == ["=="], requirement
        assert hashes, f"{requirement} has no hash"
        assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", each) for each in hashes), requirement
    assert "://" not in TEXT
    assert "--index-url" not in TEXT
    assert "--find-links" not in TEXT


def test_torch_is_the_cpu_build_of_set_up() -> None:
    pinned = re.search(r"^PINNED_TORCH=(.+)$", (ROOT / "reproduce.sh").read_text(encoding="utf-8"), re.MULTILINE)
    assert pinned is not None
    assert str(_at("3.11", [each for each, _ in LOCKED])["torch"]) == f"{pinned[1]}+cpu"
    assert not [each for each, _ in LOCKED if each.name.startswith(("nvidia", "triton", "cuda"))]


@pytest.mark.parametrize("python", PYTHONS)
def test_versions_are_those_of_the_constraints_and_nothing_declared_is_missing(python: str) -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    constraints = _at(python, [Requirement(line) for line in lines if line and not line.startswith("#")])
    locked = _at(python, [each for each, _ in LOCKED])
    for name in locked.keys() - {"torch"}:
        assert locked[name].specifier == constraints[name].specifier, name
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    for line in (*declared["project"]["dependencies"], *declared["dependency-groups"]["dev"]):
        asked = Requirement(line)
        version = next(iter(locked[canonicalize_name(asked.name)].specifier)).version
        assert asked.specifier.contains(version), f"{asked} against {version}"
