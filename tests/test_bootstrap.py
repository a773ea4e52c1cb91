"""reproduce.sh sets itself up or says in a sentence why not; tried with a Python that installs nothing."""

import fcntl
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]

# Answers what reproduce.sh asks a Python, notes in $CALLS what it was told to do, and keeps "its torch" in a
# file beside itself. Only the fingerprint and the lock go to a real Python: they change nothing.
FAKE_PYTHON = """#!/bin/bash
case "$*" in
  *version_info*) echo "${FAKE_VERSION:-3.12.1}" ;;
  *hashlib* | *fcntl*) exec "$REAL_PYTHON" "$@" ;;
  *"print(torch.__version__)"*) [ -n "$FAKE_BASE_TORCH" ] && echo "$FAKE_BASE_TORCH" ;;
  *'print(version("torch"))'*) cat "$0.torch" 2>/dev/null ;;
  *"print(pip.__version__)"*) echo "${FAKE_PIP:-26.3}" ;;
  *'print(sysconfig.get_path("purelib"))'*) dirname "$0" ;;
  "-m venv"*)
    echo "$*" >>"$CALLS"
    home=${!#}
    mkdir -p "$home/bin" && touch "$home/pyvenv.cfg" && cp "$0" "$home/bin/python"
    [[ "$*" != *--system-site-packages* ]] || echo "$FAKE_BASE_TORCH" >"$home/bin/python.torch" ;;
  "-m pip install"*)
    echo "$*" >>"$CALLS"
    if [ -n "$FAKE_PIP_SAYS" ] && [[ "$*" == *"$FAKE_PIP_FAILS_AT"* ]]; then echo "$FAKE_PIP_SAYS"; exit 1; fi
    [[ "$*" != *"--upgrade torch=="* ]] || echo 2.13.0+cpu >"$0.torch" ;;
  "-m pip uninstall"*) echo "$*" >>"$CALLS"; rm -f "$0.torch" ;;
  "-m analysis.driver.reproduce"* | "-m pytest"*) printf '%s|' "$MPLBACKEND" "$PYTHONUTF8" "$WANDB_SILENT" "$@" ;;
esac
"""
PYTHONS = ("python3", "python3.13", "python3.12", "python3.11")


class Clone:
    """A copy of the files set-up reads, a PATH whose Pythons are fakes, and what these were asked to do."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "clone"
        self.programs = folder / "programs"
        self.calls_file = folder / "calls"
        self.venv = self.folder / ".venv"
        self.folder.mkdir()
        self.programs.mkdir()
        for name in ("reproduce.sh", "pyproject.toml", "constraints.txt"):
            shutil.copy(ROOT / name, self.folder)
        for name in PYTHONS:
            self.add_program(name, FAKE_PYTHON)
        self.environment = {
            "PATH": f"{self.programs}:/usr/bin:/bin",
            "HOME": str(folder),
            "REAL_PYTHON": sys.executable,
            "CALLS": str(self.calls_file),
        }

    def add_program(self, name: str, text: str) -> None:
        (self.programs / name).write_text(text)
        (self.programs / name).chmod(0o755)

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["./reproduce.sh", *arguments],
            cwd=self.folder,
            env=self.environment | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        process = self.start(*arguments, **environment)
        out, err = process.communicate(timeout=60)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def take_calls(self) -> list[str]:
        """What the fakes were asked to do since the last look, as lines."""
        if not self.calls_file.exists():
            return []
        lines = self.calls_file.read_text().splitlines()
        self.calls_file.unlink()
        return lines


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path)


@pytest.mark.parametrize("word", ["--help", "-h", "help"])
def test_help_names_every_verb_and_setting(clone: Clone, word: str) -> None:
    done = clone.run(word)
    assert done.returncode == 0
    for word in ("paper", "all", "quick", "setup", "test", "--results", "--out", "RPBENCH_VENV", "RPBENCH_TORCH_INDEX"):
        assert word in done.stdout
    assert clone.take_calls() == []


@pytest.mark.parametrize(
    "arguments, environment, named",
    [
        (["qick"], {}, "'qick'"),
        (["setup", "now"], {}, "'now'"),
        ([], {"RPBENCH_TORCH": "rocm"}, "RPBENCH_TORCH=rocm"),
    ],
)
def test_a_wrong_request_ends_with_status_2_and_leaves_nothing(
    clone: Clone, arguments: list[str], environment: dict[str, str], named: str
) -> None:
    done = clone.run(*arguments, **environment)
    assert done.returncode == 2
    assert named in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not clone.venv.exists()


def test_an_old_python_is_refused_with_its_version_and_the_rule(clone: Clone) -> None:
    done = clone.run("quick", FAKE_VERSION="3.9.2")
    assert done.returncode == 1
    assert "python3 is Python 3.9.2" in done.stderr
    assert "3.11 or newer" in done.stderr
    assert "PYTHON=" in done.stderr
    assert not clone.venv.exists()


def test_a_named_python_that_does_not_run_is_refused(clone: Clone) -> None:
    done = clone.run("quick", PYTHON="no-such-python")
    assert done.returncode == 1
    assert "no-such-python does not run here" in done.stderr


def test_a_newer_python_stands_in_for_an_old_python3(clone: Clone) -> None:
    clone.add_program("python3", FAKE_PYTHON.replace("${FAKE_VERSION:-3.12.1}", "3.10.4"))
    clone.add_program("python3.13", "#!/bin/sh\nexit 127\n")
    done = clone.run("setup")
    assert done.returncode == 0, done.stderr
    assert "3.12.1" in done.stdout


def test_torch_comes_first_and_is_held_while_the_rest_installs(clone: Clone) -> None:
    done = clone.run("setup")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"ready: Python 3.12.1, torch 2.13.0+cpu, in {clone.venv}\n"
    venv, torch, rest = clone.take_calls()
    assert venv == f"-m venv {clone.venv}"
    assert torch.endswith("--upgrade torch==2.13.0")
    assert "-c constraints.txt" in rest
    assert rest.endswith("--editable . --group dev")
    held = clone.venv / "rpbench-setup/torch-constraint.txt"
    assert f"-c {held}" in rest
    assert held.read_text() == "torch==2.13.0+cpu\n"


def test_an_old_pip_is_renewed_first(clone: Clone) -> None:
    clone.run("setup", FAKE_PIP="23.2.1")
    assert clone.take_calls()[1].endswith("pip>=25.3")


def test_the_second_run_installs_nothing(clone: Clone) -> None:
    clone.run("setup")
    clone.take_calls()
    again = clone.run("quick")
    assert again.stdout == "Agg|1|true|-m|analysis.driver.reproduce|quick|"
    assert again.stderr == ""
    assert clone.take_calls() == []


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_changed_requirements_are_installed(clone: Clone, name: str) -> None:
    clone.run("setup")
    clone.take_calls()
    with (clone.folder / name).open("a") as file:
        file.write("# changed\n")
    clone.run("setup")
    (only,) = clone.take_calls()
    assert "--editable ." in only


def test_a_torch_that_is_there_is_used_and_not_replaced(clone: Clone) -> None:
    done = clone.run("setup", FAKE_BASE_TORCH="2.11.0+cu130")
    assert "torch 2.11.0+cu130" in done.stdout
    venv, rest = clone.take_calls()
    assert "--system-site-packages" in venv
    assert "--editable ." in rest
    assert (clone.venv / "rpbench-setup/torch-constraint.txt").read_text() == "torch==2.11.0+cu130\n"


def test_a_torch_too_old_to_serve_is_left_where_it_is(clone: Clone) -> None:
    done = clone.run("setup", FAKE_BASE_TORCH="2.6.0+cu124")
    assert "leaving the torch 2.6.0+cu124" in done.stderr
    assert "torch 2.13.0+cpu" in done.stdout
    assert "--system-site-packages" not in clone.take_calls()[0]


def test_another_torch_is_installed_only_on_request(clone: Clone) -> None:
    clone.run("setup")
    clone.take_calls()
    request = {"RPBENCH_TORCH_SPEC": "torch==2.12.1", "RPBENCH_TORCH_INDEX": "https://example.org/cpu"}
    clone.run("setup", **request)
    uninstall, torch, _ = clone.take_calls()
    assert uninstall == "-m pip uninstall --yes torch"
    assert torch.endswith("--upgrade torch==2.12.1 --index-url https://example.org/cpu")
    clone.run("setup", **request)
    clone.run("setup")
    assert clone.take_calls() == []


def test_an_interrupted_setup_goes_on_where_it_stopped(clone: Clone) -> None:
    failed = clone.run("quick", FAKE_PIP_SAYS="Killed", FAKE_PIP_FAILS_AT="--editable")
    assert failed.returncode == 1
    assert failed.stdout == ""
    clone.take_calls()
    done = clone.run("quick")
    assert done.returncode == 0
    (only,) = clone.take_calls()
    assert "--editable ." in only


@pytest.mark.parametrize(
    "says, sentence",
    [
        (
            "WARNING: Retrying after connection broken by 'NewConnectionError'",
            "no package index can be reached",
        ),
        ("ERROR: [Errno 28] No space left on device", "the disk is full"),
        ("ERROR: Cannot install a and b", "it says: ERROR: Cannot install a and b"),
    ],
)
def test_what_stops_pip_is_said_in_a_sentence_that_names_the_log(clone: Clone, says: str, sentence: str) -> None:
    done = clone.run("quick", FAKE_PIP_SAYS=says)
    assert done.returncode == 1
    reason = done.stderr.splitlines()[-1]
    assert sentence in reason
    assert str(clone.venv / "rpbench-setup/pip.log") in reason


def test_too_little_space_is_noticed_before_anything_is_installed(clone: Clone) -> None:
    clone.add_program("df", "#!/bin/sh\nprintf 'head\\nnone 100 1 204800 1%% /\\n'\n")
    done = clone.run("quick")
    assert done.returncode == 1
    assert "200 MiB are free" in done.stderr
    assert "3072 MiB" in done.stderr
    assert clone.take_calls() == []


def test_a_folder_that_cannot_be_made_is_named(clone: Clone) -> None:
    (clone.folder / "file").touch()
    done = clone.run("quick", RPBENCH_VENV="file/environment")
    assert done.returncode == 1
    assert f"{clone.folder}/file/environment cannot be written" in done.stderr


def test_a_folder_with_other_things_in_it_is_left_alone(clone: Clone) -> None:
    home = clone.folder / "home"
    home.mkdir()
    (home / "letter.txt").touch()
    done = clone.run("quick", RPBENCH_VENV="home")
    assert done.returncode == 1
    assert "neither empty nor a Python environment" in done.stderr
    assert [path.name for path in home.iterdir()] == ["letter.txt"]


def test_an_environment_of_an_old_python_is_refused(clone: Clone) -> None:
    clone.run("setup")
    (clone.folder / "pyproject.toml").write_text("# changed")
    done = clone.run("quick", FAKE_VERSION="3.10.4")
    assert done.returncode == 1
    assert f"{clone.venv} holds Python 3.10.4" in done.stderr


def test_test_passes_its_arguments_to_pytest(clone: Clone) -> None:
    done = clone.run("test", "-k", "one or two")
    assert done.stdout == "Agg|1|true|-m|pytest|-k|one or two|"


@pytest.mark.parametrize("words", [("--out", "b"), ("all", "--results", "a", "--out", "b"), ("quick", "--results=a")])
def test_a_reproduction_takes_its_folders(clone: Clone, words: tuple[str, ...]) -> None:
    asked = words if words[0] in ("all", "quick") else ("paper", *words)
    done = clone.run(*words)
    assert done.stdout == "|".join(("Agg", "1", "true", "-m", "analysis.driver.reproduce", *asked, ""))


def test_two_setups_take_turns(clone: Clone) -> None:
    state = clone.venv / "rpbench-setup"
    state.mkdir(parents=True)
    with (state / "lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        process = clone.start("setup")
        assert process.stderr is not None
        assert "another set-up works in the same folder" in process.stderr.readline()
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=0.7)
        assert clone.take_calls() == []
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert len(clone.take_calls()) == 3


CONSTRAINTS = [
    Requirement(line)
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if line and not line.startswith("#")
]


def declared_requirements() -> list[Requirement]:
    text = tomllib.loads((ROOT / "pyproject.toml").read_text())
    groups = [text["project"]["dependencies"], text["dependency-groups"]["dev"]]
    groups += text["project"]["optional-dependencies"].values()
    return [Requirement(line) for group in groups for line in group if not line.startswith("torch>")]


def test_constraints_are_exact_versions_that_hold_anywhere() -> None:
    for constraint in CONSTRAINTS:
        assert constraint.url is None, f"{constraint} is a place, not a version"
        assert [spec.operator for spec in constraint.specifier] == ["=="], constraint
        assert "+" not in str(constraint.specifier), f"{constraint} is a local build"
        assert not canonicalize_name(constraint.name).startswith(("torch", "nvidia", "triton", "rpbench"))


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_every_declared_requirement_has_one_constraint_that_meets_it(python: str) -> None:
    pinned: dict[str, str] = {}
    for constraint in CONSTRAINTS:
        if constraint.marker is None or constraint.marker.evaluate({"python_version": python}):
            name = canonicalize_name(constraint.name)
            assert name not in pinned, f"{name} is constrained twice for Python {python}"
            pinned[name] = next(iter(constraint.specifier)).version
    for requirement in declared_requirements():
        version = pinned.get(canonicalize_name(requirement.name))
        assert version is not None, f"{requirement} has no constraint for Python {python}"
        assert requirement.specifier.contains(version), f"{requirement} against {version}"
