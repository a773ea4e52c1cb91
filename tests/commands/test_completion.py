"""What a shell completes: verbs, keys, names of schedules and models, in bash and in fish."""

import shutil
import subprocess

import pytest

from rpbench.commands.completion import completion

VERBS = ["run", "list", "show", "calibrate"]
COMPLETED = pytest.mark.parametrize(
    "line, expected",
    [
        ("rpbench schedule=gpip", ["gpipe"]),
        ("rpbench -m schedule=gpipe,1f", ["gpipe,1f1b"]),
        ("rpbench model=llama31_8", ["llama31_8b"]),
        ("rpbench cal", ["calibrate"]),
        ("rpbench list mod", ["models", "modes"]),
        ("rpbench new g", ["gpu"]),
        ("rpbench show num_dev", ["num_devices="]),
        ("rpbench advise model=tiny_gpt bat", ["batch="]),
        ("rpbench advise batch=", ["max"]),
        ("rpbench charge=", ["hops", "bytes"]),
        ("rpbench model=zzz", []),
    ],
)


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
@COMPLETED
def test_bash_completes(line, expected):
    words, script = line.split(), completion(["bash"], VERBS)
    place = f"COMP_LINE='{line}' COMP_POINT={len(line)} COMP_WORDS=({' '.join(words)}) COMP_CWORD={len(words) - 1}"
    call = f"{place}\n_rpbench; printf '%s\\n' " + '"${COMPREPLY[@]}"'
    done = subprocess.run(["bash", "-c", script + call], capture_output=True, text=True, check=True)
    assert done.stdout.split() == expected
    assert done.stderr == ""


@pytest.mark.skipif(shutil.which("fish") is None, reason="no fish here")
@COMPLETED
def test_fish_completes(line, expected, tmp_path):
    script = tmp_path / "rpbench.fish"
    script.write_text(completion(["fish"], VERBS))
    call = ["fish", "--no-config", "-c", f"source {script}; complete -C '{line}'"]
    done = subprocess.run(call, capture_output=True, text=True, check=True, cwd=tmp_path.parent)
    head = line.split()[-1].rpartition("=")[0]  # fish completes whole words
    found = [word.removeprefix(f"{head}=") if head else word for word in done.stdout.split()]
    assert sorted(found) == sorted(expected)
    assert done.stderr == ""
