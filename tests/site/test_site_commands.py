"""Every command of the documentation: cheap ones in this process, all others in a copy of the clone under `slow`."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rpbench.cli import all_verbs, dispatch
from rpbench.ir.schedule import Shape
from tests.site.site_pages import GROUNDS, PAGES, ROOT, blocks, commands, fences, name_of, write_file

OURS = "|".join(all_verbs())
COMMANDS = re.compile(
    rf"\s*(python -m|torchrun |\./reproduce|rpbench (-m|\w+=|({OURS})\b)|pip install|wandb (login|sync)"
    r"|jupyter |pytest |git clone)"
)
CHEAP = [page for page in PAGES if any(b.language == "bash" and not b.mark for b in blocks(page))]
SLOW = [page for page in PAGES if any(b.language == "bash" and b.mark == "slow" for b in blocks(page))]
MARGIN_S = 600


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_says_what_is_done_with_it(page):
    for block in blocks(page):
        assert not block.mark or block.language == "bash", f"line {block.line}: only commands bear a mark"
        if block.mark == "no-run":
            assert block.reason.startswith(GROUNDS), f"line {block.line}: {block.reason!r}: none of {GROUNDS}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_command_stands_outside_a_block(page):
    inside = {
        line
        for block in blocks(page)
        if block.language == "bash" or block.title
        for line in range(block.line, block.line + block.text.count("\n") + 2)
    }
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        found = number not in inside and COMMANDS.match(line)
        assert not found, f"line {number}: {line.strip()!r} is run by no test; put it into a ```bash block"


@pytest.mark.parametrize(
    "words", ["run: never", "no-run", 'file="a.txt"', "slow:", "no-run: needs a GPU` "], ids=lambda words: words[:8]
)
def test_other_words_behind_a_fence_are_refused(words):
    page = f"```bash {words}\ntrue\n```\n"
    if "`" in words:
        assert list(fences(page)) == []
        return
    with pytest.raises(ValueError, match="line 1"):
        list(fences(page))


def test_the_generator_of_the_page_says_where_its_stages_are():
    """Without a placement an action may stand on any device, and the property tests refuse the schedule."""
    (block,) = (b for b in blocks(ROOT / "docs/howto/own_schedule.md") if b.title.endswith("gpipe_reversed.py"))
    decorator = '@schedule("gpipe_reversed", source="example of the documentation")\n'
    assert decorator in block.text
    module: dict[str, Any] = {}
    exec(block.text.replace(decorator, ""), module)  # unregistered: other tests see all schedules
    assert module["gpipe_reversed"](Shape(3, 3, 4)).placement == ((0,), (1,), (2,))


def test_a_fence_without_an_end_is_refused():
    with pytest.raises(ValueError, match="never ends"):
        list(fences("```bash\ntrue\n"))


@pytest.mark.parametrize("page", CHEAP, ids=name_of)
def test_cheap_commands_run(page, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    for block in blocks(page):
        if block.title:
            write_file(block, tmp_path)
        elif block.language == "bash" and not block.mark:
            for command in commands(block.text):
                assert _status(command, tmp_path, capfd) == 0, f"line {block.line}: {command}"


def _status(command: str, folder: Path, capfd) -> int:
    """The exit status of a command of ours, run in this process; its stdout goes where `>` says."""
    words = shlex.split(command)
    target = words[-1] if ">" in words else None
    assert words[:3] == ["python", "-m", "rpbench"], f"{command!r}: a cheap block has rpbench's commands alone; mark it"
    status = dispatch(words[3 : words.index(">")] if target else words[3:])
    out, err = capfd.readouterr()
    if target:
        (folder / target).write_text(out, encoding="utf-8")
    elif status:
        print(err, file=sys.stderr)
    return status


@pytest.fixture(scope="session")
def clone(tmp_path_factory) -> Path:
    """The files of the repository as they are now."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    folder = tmp_path_factory.mktemp("site") / "rpbench"
    for name in filter(None, names):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_file():
            shutil.copy2(ROOT / name, target)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("page", SLOW, ids=name_of)
def test_all_commands_of_a_page_run_in_a_clone(page, clone, tmp_path):
    folder = tmp_path / "rpbench"
    shutil.copytree(clone, folder)
    script = []
    for block in blocks(page):
        if block.title:
            write_file(block, folder)
        elif block.language == "bash" and block.mark != "no-run":
            script.append(block.text)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(folder), "MPLBACKEND": "Agg", "WANDB_SILENT": "true"}
    ended = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", "".join(script)],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=MARGIN_S,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-3000:]
