"""Installed as a wheel, away from the clone: what is shipped is found, and so is what a user or a package adds."""

import json
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow

PACKAGE = {
    "their_orders/__init__.py": "",
    "their_orders/orders.py": '''"""A schedule of a package."""

from baselines.synchronous.gpipe import gpipe
from rpbench.registry import schedule


@schedule("their_order", source="a package")
def their_order(shape):
    return gpipe(shape)
''',
    "their_orders/model/their_model.yaml": "name: their_model\nnum_layers: 4\nhidden: 64\nheads: 2\nvocab: 99\n",
    "their_orders-1.dist-info/METADATA": "Metadata-Version: 2.1\nName: their_orders\nVersion: 1\n",
    "their_orders-1.dist-info/entry_points.txt": (
        "[rpbench.schedules]\nmine = their_orders.orders\n[rpbench.conf]\nmine = their_orders\n"
    ),
}


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The command of an environment with the wheel, made of a copy of what git has here; other packages are ours."""
    folder = tmp_path_factory.mktemp("wheel")
    source, target = folder / "source", folder / "environment"
    source.mkdir()
    files = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, check=True).stdout
    packed = subprocess.run(
        ["tar", "-C", str(ROOT), "--null", "-cT", "-"], input=files, capture_output=True, check=True
    )
    subprocess.run(["tar", "-C", str(source), "-x"], input=packed.stdout, check=True)
    build = "from setuptools.build_meta import build_wheel; build_wheel('..')"
    subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, check=True)
    venv.create(target)
    (wheel,) = folder.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "--python", str(target), "install", "-q", "--no-deps", "--no-index"]
    subprocess.run([*pip, str(wheel)], check=True)
    (packages,) = target.glob("lib/python*/site-packages")
    (packages / "ours.pth").write_text(sysconfig.get_path("purelib") + "\n")
    for name, text in PACKAGE.items():
        path = packages / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return target / "bin" / "rpbench"


@pytest.fixture
def call(installed, tmp_path):
    """Run the command in an empty folder; its lines of stdout as data."""
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "RPBENCH_PATH")}

    def run(*arguments):
        done = subprocess.run(
            [str(installed), *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    return run


def test_what_is_shipped_runs_from_an_empty_folder(call, installed, tmp_path):
    (row,) = call("schedule=1f1b", "model=llama31_8b", "cluster=8x_h100", "cost=analytic")
    assert (row["status"], row["git_commit"]) == ("ok", None)
    (row,) = call("model=qwen3_1p7b", "cost=published", "partition=published")  # a table of analysis/
    assert row["status"] == "ok"
    assert {"l40s", "mi300x"} <= {each["name"] for each in call("list", "gpus")}
    assert not list(tmp_path.rglob("*.py"))


def test_what_new_writes_runs_at_once(call):
    for kind in ("model", "cluster", "schedule"):
        call("new", kind, f"my_{kind}")
    (row,) = call("model=my_model", "cluster=my_cluster", "schedule=my_schedule", "cost=analytic")
    assert (row["status"], row["num_devices"], row["model"]) == ("ok", 4, "my_model")
    assert row["config"]["sha256"].keys() == {"schedule.generator"}


def test_a_package_brings_schedules_and_models(call):
    assert "their_order" in {row["name"] for row in call("list", "schedules")}
    (row,) = call("schedule=their_order", "model=their_model", "num_devices=2")
    assert (row["status"], row["schedule"], row["model"]) == ("ok", "their_order", "their_model")
