"""Ranks that torchrun starts: one agent, and two agents on loopback, which stand for two hosts."""

import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROGRAM = str(Path(__file__).with_name("torchrun_program.py"))
ROOT = Path(__file__).parents[2]
FOLDERS = (ROOT, Path(__file__).parents[1], Path(__file__).parent)

pytestmark = pytest.mark.slow


def agent(*options, arguments):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(map(str, FOLDERS))}
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *options, PROGRAM, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env=environment,
        start_new_session=True,
    )


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def two_agents(*arguments):
    """A rendezvous on a port of its own; the first of them hosts it."""
    end = f"127.0.0.1:{free_port()}"
    options = ("--nnodes=2", "--nproc-per-node=2", "--rdzv-backend=c10d", f"--rdzv-endpoint={end}", "--rdzv-id=test")
    agents = [agent(*options, "--local-addr=127.0.0.1", arguments=arguments) for _ in range(2)]
    return [(process.communicate(timeout=200)[0], process.returncode) for process in agents]


def fields_in(words):
    return [json.loads(line.removeprefix("FIELDS ")) for line in words.splitlines() if line.startswith("FIELDS ")]


def assert_nobody_is_left():
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if os.access(path, os.R_OK)]
        if not any(PROGRAM.encode() in command for command in commands):
            return
        time.sleep(0.5)
    pytest.fail("a rank outlives its run")


def test_one_agent():
    process = agent("--nproc-per-node=2", f"--master-port={free_port()}", arguments=("zb_v", "2"))
    words, _ = process.communicate(timeout=120)
    (fields,) = fields_in(words)  # rank 0 alone has them
    assert process.returncode == 0
    assert fields["rows_as_ours"]
    assert fields["grad_max_rel_diff"] <= 1e-15


def test_two_agents_are_one_run():
    found = two_agents("zb_v", "4")
    (fields,) = [fields for words, _ in found for fields in fields_in(words)]
    assert [status for _, status in found] == [0, 0]
    assert fields["rows_as_ours"]
    assert fields["grad_max_rel_diff"] <= 1e-15
    assert len(fields["hosts"]) == 4
    assert_nobody_is_left()


@pytest.mark.parametrize(
    "what, said", [("kill", "rank 3 on .* died"), ("hang", "rank 3 on .* hangs"), ("stop", "rank 3 on .* is stopped")]
)
def test_a_lost_rank_of_the_second_host_ends_both(what, said):
    began = time.monotonic()
    found = two_agents("1f1b", "4", f"3:3B1:{what}")
    words = "\n".join(each for each, _ in found)
    assert all(status != 0 for _, status in found)
    assert re.search(said + r".* at 3B1 of step 0", words)
    assert ">3B1<" in words
    assert time.monotonic() - began < 150  # starts included; see `ends_all` in test_running for the bound itself
    assert_nobody_is_left()
