"""reproduce.sh sets itself up or says in a sentence why not; tried with a Python and a uv that install nothing."""

import fcntl
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from analysis.driver.uv_settings import uv_settings

ROOT = Path(__file__).resolve().parents[1]

# Answers what reproduce.sh asks a Python, notes in $CALLS what it was told to do, and keeps "its torch" in a
# file beside itself. Only the lock and the settings go to a real Python: they change nothing.
FAKE_PYTHON = """#!/bin/bash
case "$*" in
  -VV) echo "Python ${FAKE_VERSION:-3.12.1}" ;;
  *version_info*)
    version=${FAKE_VERSION:-3.12.1} minor=${FAKE_VERSION:-3.12}
    minor=${minor#3.}; echo "$version"; [[ ${minor%%.*} -ge 11 ]] ;;
  *fcntl* | *uv_settings.py) exec "$REAL_PYTHON" "$@" ;;
  *'version("torch")'*)
    if [[ $0 == $FAKE_PYTHONS/* ]]; then version=$FAKE_BASE_TORCH; else version=$(cat "$0.torch" 2>/dev/null); fi
    echo "$version"; [[ -n $version && $version != 2.6* ]] ;;
  *getsitepackages*) dirname "$0" ;;
  "-m venv"*) mkdir -p "${!#}/bin" && cp "$0" "${!#}/bin/python" ;;
  "-m pip config list") echo "global.index-url='https://mirror.example/simple'" ;;
  "-m pip install"*)
    echo "pip $* index=$PIP_INDEX_URL" >>"$CALLS"
    if [[ -n $FAKE_SAYS && "$*" == *"${FAKE_FAILS_AT:-uv}"* ]]; then echo "$FAKE_SAYS"; exit 1; fi
    cp "$FAKE_UV" "$(dirname "$0")/uv" ;;
  "-m analysis.driver.reproduce"* | "-m pytest"*) printf '%s|' "$MPLBACKEND" "$PYTHONUTF8" "$WANDB_SILENT" "$@" ;;
esac
"""
FAKE_UV = """#!/bin/bash
home=${*: -1}
case "$*" in
  --version) echo uv 0.9 ;;
  venv*)
    echo "$*" >>"$CALLS"
    mkdir -p "$home/bin" && touch "$home/pyvenv.cfg" && cp "${*: -2:1}" "$home/bin/python"
    [[ "$*" != *--system-site-packages* ]] || echo "$FAKE_BASE_TORCH" >"$home/bin/python.torch" ;;
  "pip install"*)
    echo "$* index=$UV_INDEX_URL" >>"$CALLS"
    if [[ -n $FAKE_HANGS_AT && "$*" == *"$FAKE_HANGS_AT"* ]]; then
      echo "$$" >"$CALLS.new" && mv "$CALLS.new" "$CALLS.pid"
      exec sleep 60
    fi
    if [[ -n $FAKE_SAYS && "$*" == *"$FAKE_FAILS_AT"* ]]; then echo "$FAKE_SAYS"; exit 1; fi
    [[ "$*" != *torch==* ]] || echo "${FAKE_NEW_TORCH:-2.13.0+cpu}" >"$4.torch" ;;
esac
"""


class Clone:
    """A copy of the files set-up reads, a PATH whose Pythons are fakes, and what these were asked to do."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "a clone"  # a path may hold spaces
        self.programs = folder / "programs"
        self.calls_file = folder / "calls"
        self.venv = self.folder / ".venv"
        self.state = self.venv / "rpbench-setup"
        self.programs.mkdir()
        for name in ("reproduce.sh", "pyproject.toml", "requirements.lock", "analysis/driver/uv_settings.py"):
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, self.folder / name)
        for name in ("python3", "python3.13", "python3.12", "python3.11"):
            self.add_program(name, FAKE_PYTHON)
        self.add_program("fake_uv", FAKE_UV)
        self.environment = {
            "PATH": f"{self.programs}:/usr/bin:/bin",
            "HOME": str(folder),
            "REAL_PYTHON": sys.executable,
            "FAKE_PYTHONS": str(self.programs),
            "FAKE_UV": str(self.programs / "fake_uv"),
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
        """What the fakes were asked to do since the last look, as lines without the name of the environment."""
        if not self.calls_file.exists():
            return []
        lines = self.calls_file.read_text().replace(f" --python {self.venv}/bin/python", "").splitlines()
        self.calls_file.unlink()
        return lines


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path)


@pytest.mark.parametrize("word", ["--help", "-h", "help"])
def test_help_names_every_verb_and_setting(clone: Clone, word: str) -> None:
    done = clone.run(word)
    assert done.returncode == 0
    assert done.stdout.startswith("usage: ./reproduce.sh")
    verbs = ("paper", "all", "quick", "gpu", "duels", "setup", "test", "--results", "--out")
    for word in (*verbs, "PYTHON ", "RPBENCH_VENV", "RPBENCH_TORCH ", "RPBENCH_TORCH_SPEC", "RPBENCH_TORCH_INDEX"):
        assert word in done.stdout
    assert clone.take_calls() == []


@pytest.mark.parametrize(
    "arguments, environment, named",
    [
        (["qick"], {}, "'qick'"),
        (["full"], {}, "now called all"),
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
    clone.add_program("python3", "#!/bin/sh\necho 3.10.4\nexit 1\n")
    clone.add_program("python3.13", "#!/bin/sh\nexit 127\n")
    done = clone.run("setup")
    assert done.returncode == 0, done.stderr
    assert f"--python {clone.programs}/python3.12 " in clone.take_calls()[1]


def test_torch_comes_first_and_the_rest_is_installed_by_its_hashes(clone: Clone) -> None:
    done = clone.run("setup")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"ready: Python 3.12.1, torch 2.13.0+cpu, in {clone.venv}\n"
    uv, venv, torch, rest, editable = clone.take_calls()
    assert uv.startswith("pip -m pip install")
    assert "uv>=" in uv
    assert venv == f"venv --allow-existing --python {clone.programs}/python3 {clone.venv}"
    held = "pip install -b requirements.lock"
    mirror = "index=https://mirror.example/simple"
    assert torch == f"pip install --reinstall -b requirements.lock torch==2.13.0 {mirror}"
    assert rest == f"{held} --no-deps --require-hashes -r requirements.lock {mirror}"
    assert editable == f"{held} --no-deps --editable . {mirror}"


def test_the_second_run_installs_nothing(clone: Clone) -> None:
    clone.run("setup")
    clone.take_calls()
    again = clone.run("quick")
    assert again.stdout == "Agg|1|true|-m|analysis.driver.reproduce|quick|"
    assert again.stderr == ""
    assert clone.take_calls() == []


@pytest.mark.parametrize("name", ["pyproject.toml", "requirements.lock"])
def test_changed_requirements_are_installed_and_torch_stays(clone: Clone, name: str) -> None:
    clone.run("setup")
    clone.take_calls()
    with (clone.folder / name).open("a") as file:
        file.write("# changed\n")
    clone.run("setup")
    rest, editable = clone.take_calls()
    assert "-r requirements.lock" in rest
    assert "--reinstall" not in rest
    assert "--editable ." in editable


def test_a_torch_that_is_there_is_used_and_not_replaced(clone: Clone) -> None:
    done = clone.run("setup", FAKE_BASE_TORCH="2.11.0+cu130")
    assert "torch 2.11.0+cu130" in done.stdout, done.stderr
    _, venv, rest, _ = clone.take_calls()
    assert "--system-site-packages" in venv
    assert "--no-deps --require-hashes" in rest


def test_a_torch_too_old_to_serve_is_left_where_it_is(clone: Clone) -> None:
    done = clone.run("setup", FAKE_BASE_TORCH="2.6.0+cu124")
    assert "torch 2.13.0+cpu" in done.stdout
    assert "--system-site-packages" not in clone.take_calls()[1]


def test_a_torch_too_old_in_a_named_environment_is_not_replaced_unasked(clone: Clone) -> None:
    clone.run("setup")
    clone.take_calls()
    (clone.venv / "bin/python.torch").write_text("2.6.0\n")
    done = clone.run("quick")
    assert done.returncode == 1
    assert "holds torch 2.6.0" in done.stderr
    assert "RPBENCH_TORCH_SPEC" in done.stderr
    assert clone.take_calls() == []


def test_another_torch_is_installed_only_on_request(clone: Clone) -> None:
    clone.run("setup")
    clone.take_calls()
    request = {"RPBENCH_TORCH_SPEC": "torch==2.12.1", "RPBENCH_TORCH_INDEX": "https://example.org/cpu"}
    clone.run("setup", **request)
    torch, *_ = clone.take_calls()
    assert "--reinstall" in torch
    assert "torch==2.12.1 --default-index https://example.org/cpu" in torch
    clone.run("setup", **request)
    clone.run("setup")
    assert clone.take_calls() == []


def test_a_setup_that_failed_goes_on_and_installs_anew_what_may_be_half(clone: Clone) -> None:
    failed = clone.run("quick", FAKE_SAYS="Killed", FAKE_FAILS_AT="--require-hashes")
    assert failed.returncode == 1
    assert failed.stdout == ""
    clone.take_calls()
    done = clone.run("quick")
    assert done.returncode == 0
    rest, editable = clone.take_calls()
    assert "--reinstall" in rest
    assert "--reinstall" in editable
    assert "--editable ." in editable


def test_a_torch_that_was_interrupted_is_installed_again(clone: Clone) -> None:
    clone.run("quick", FAKE_SAYS="Killed", FAKE_FAILS_AT="torch==2.13.0")
    (clone.venv / "bin/python.torch").write_text("2.13.0\n")  # its metadata may lie there already
    clone.take_calls()
    done = clone.run("setup")
    assert "--reinstall -b requirements.lock torch==2.13.0" in clone.take_calls()[0]
    assert "torch 2.13.0+cpu" in done.stdout


def test_a_signal_ends_the_set_up_and_what_it_started_at_once(clone: Clone) -> None:
    process = clone.start("setup", FAKE_HANGS_AT="--require-hashes")
    assert process.stderr is not None
    while "requirements.lock" not in process.stderr.readline():
        pass
    while not clone.calls_file.with_suffix(".pid").exists():
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=10)
    assert process.returncode == 130
    assert "the same command goes on from here" in err
    child = int(clone.calls_file.with_suffix(".pid").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


@pytest.mark.parametrize(
    "says, sentence",
    [
        ("error: Failed to fetch\n  cause: error sending request for url", "no package index can be reached"),
        ("WARNING: Retrying after connection broken by 'NewConnectionError'", "no package index can be reached"),
        (
            "error: Failed to download `a`\n  cause: No space left on device (os error 28)",
            "No space left on device",
        ),
        ("error: Failed to download `a`\n  cause: Hash mismatch for `a`", "cause: Hash mismatch for `a`"),
    ],
)
@pytest.mark.parametrize("fails_at", ["uv>=", "--require-hashes"])
def test_what_stops_a_set_up_is_said_in_a_sentence_that_names_the_log(
    clone: Clone, says: str, sentence: str, fails_at: str
) -> None:
    done = clone.run("quick", FAKE_SAYS=says, FAKE_FAILS_AT=fails_at)
    assert done.returncode == 1
    reason = done.stderr.splitlines()[-1]
    assert sentence in reason
    assert str(clone.state / "setup.log") in reason


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


@pytest.mark.parametrize(
    "words",
    [
        ("--out", "b"),
        ("all", "--results", "a b", "--out", "b"),
        ("quick", "--results=a"),
        ("gpu",),
        ("duels", "--out", "b"),
    ],
)
def test_a_reproduction_gets_its_scope_and_its_folders(clone: Clone, words: tuple[str, ...]) -> None:
    asked = ("paper", *words) if words[0].startswith("--") else words
    done = clone.run(*words)
    assert done.stdout == "|".join(("Agg", "1", "true", "-m", "analysis.driver.reproduce", *asked, ""))


def test_two_setups_take_turns(clone: Clone) -> None:
    clone.state.mkdir(parents=True)
    with (clone.state / "lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        process = clone.start("setup")
        assert process.stderr is not None
        assert "another set-up works in the same folder" in process.stderr.readline()
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=0.7)
        assert clone.take_calls() == []
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert len(clone.take_calls()) == 5


def test_uv_looks_where_pip_is_told_to_look() -> None:
    config = [
        ":env:.index-url='https://me:a%20b@mirror.example/simple'",
        "global.cert='/etc/own ca.pem'",
        "global.extra-index-url='\\nhttps://one.example/simple\\nfile:///two'",
        "global.find-links='/wheels /more'",
        "global.index-url='https://overruled.example/simple'",
        "install.find-links='/wheels https://three.example/x=1'",
        "install.no-index='false'",
        "install.trusted-host='one.example two.example:8080'",
        "global.timeout='180'",
    ]
    assert uv_settings(config, {}) == {
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_INDEX_URL": "https://me:a%20b@mirror.example/simple",
        "UV_EXTRA_INDEX_URL": "https://one.example/simple file:///two",
        "UV_FIND_LINKS": "/wheels,https://three.example/x=1",
        "UV_INSECURE_HOST": "one.example two.example:8080",
        "SSL_CERT_FILE": "/etc/own ca.pem",
    }


def test_what_uv_has_been_told_itself_stays() -> None:
    config = ["global.index-url='https://mirror.example/simple'", "global.no-index='1'"]
    told = {"UV_INDEX_URL": "https://own.example/simple", "UV_INDEX_STRATEGY": "first-index"}
    assert uv_settings(config, told) == {"NO_INDEX": "--no-index"}
