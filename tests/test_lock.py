"""requirements.lock: one version of everything set-up installs but torch, every file with its hash; our own version."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "requirements.lock").read_text(encoding="utf-8")
LINES = TEXT.replace("\\\n", " ").splitlines()
ENTRIES = [line.split(" --hash=") for line in LINES if not line.startswith("#")]
LOCKED = [(Requirement(head), [each.strip() for each in hashes]) for head, *hashes in ENTRIES]


def test_every_entry_is_one_version_with_its_hashes_and_no_place() -> None:
    assert len(LOCKED) > 100
    for requirement, hashes in LOCKED:
        assert [spec.operator for spec in requirement.specifier] == ["=="], requirement
        assert "+" not in str(requirement.specifier), f"{requirement} is a local build"
        assert requirement.url is None, f"{requirement} is a place, not a version"
        assert hashes, f"{requirement} has no hash"
        assert all(re.fullmatch("sha256:[0-9a-f]{64}", each) for each in hashes), requirement
    assert "://" not in TEXT
    assert "--index-url" not in TEXT
    assert "--find-links" not in TEXT


def test_the_package_has_the_version_of_the_changelog() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    released = re.search(r"^## \[(\d.*?)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert released
    assert declared == released[1]


def test_torch_is_left_to_the_machine() -> None:
    assert not [each for each, _ in LOCKED if each.name.startswith(("torch", "nvidia", "triton", "cuda", "rpbench"))]


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_every_declared_requirement_has_one_locked_version_that_meets_it(python: str) -> None:
    where = {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "sys_platform": "linux",
        "os_name": "posix",
    }
    found = [each for each, _ in LOCKED if each.marker is None or each.marker.evaluate(where)]
    locked = {canonicalize_name(each.name): each for each in found}
    assert len(locked) == len(found), "a package twice"
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    for line in (*declared["project"]["dependencies"], *declared["dependency-groups"]["dev"]):
        asked = Requirement(line)
        if asked.name != "torch":
            version = next(iter(locked[canonicalize_name(asked.name)].specifier)).version
            assert asked.specifier.contains(version), f"{asked} against {version}"
    build = Requirement(declared["build-system"]["requires"][0])
    assert build.specifier.contains(next(iter(locked[build.name].specifier)).version), "what builds rpbench"
