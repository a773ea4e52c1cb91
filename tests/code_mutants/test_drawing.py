"""What is drawn: faults in what code computes, and in nothing that it says; what is kept of them is complete."""

import re
import subprocess
import sys
from collections import Counter

import pytest

from tests.code_mutants import kept
from tests.code_mutants.__main__ import EACH, SEED
from tests.code_mutants.mutants import mutants_of
from tests.code_mutants.reach import PACKAGES

_CODE = '''"""One 1 of a docstring."""
import logging
def f(a: "1", b: int = 3) -> "2":
    """Another 1."""
    assert a < 4
    if a < b and b:
        raise ValueError(f"{a} is below {b + 5}", a + 6)
    logging.info("%d", a + 7)
    a += 1.5
    g(a, b)
    return min(a, b) if b else a
    return f"{a + 8}"
'''
_CHANGES = {
    ("off by one", "3", "4"),
    ("constant doubled", "3", "6"),
    ("comparison flipped", "a < b", "(a <= b)"),
    ("and and or", "a < b and b", "(a < b or b)"),
    ("condition negated", "a < b and b", "(not (a < b and b))"),
    ("statement dropped", "a += 1.5", "pass"),
    ("constant doubled", "1.5", "3.0"),
    ("statement dropped", "g(a, b)", "pass"),
    ("arguments swapped", "g(a, b)", "(g(b, a))"),
    ("min and max", "min(a, b)", "(max(a, b))"),
    ("condition negated", "b", "(not (b))"),
    ("sibling returned", "return min(a, b) if b else a", "return f'{a + 8}'"),
    ("sibling returned", 'return f"{a + 8}"', "return min(a, b) if b else a"),
}


def test_code_is_changed_and_no_text(tmp_path):
    path = tmp_path / "rpbench" / "ir" / "code.py"
    path.parent.mkdir(parents=True)
    path.write_text(_CODE)
    found = mutants_of(path, tmp_path)
    assert {(each.kind, each.old, each.new) for each in found} == _CHANGES
    assert len({each.key for each in found}) == len(found) == len(_CHANGES)
    for each in found:
        changed = each.applied(_CODE.encode()).decode()
        compile(changed, "code.py", "exec")
        assert changed.splitlines()[: each.line - 1] == _CODE.splitlines()[: each.line - 1]


def test_what_is_kept_is_whole_and_named_where_it_lives():
    rows = kept.rows()
    assert Counter(row.package for row in rows) == dict.fromkeys(PACKAGES, EACH)
    assert len({row.key for row in rows}) == len(rows)
    assert all(row.by for row in rows if row.status in kept.DEAD)
    assert all(row.why for row in rows if row.status in ("survived", kept.EQUAL))
    assert kept.share(rows) >= kept.BAR


def test_the_page_has_the_table_of_what_is_kept():
    table = kept.PAGE.read_text().partition(kept.BEGIN)[2].partition(kept.END)[0].strip()
    date = table.partition("tried on ")[2].partition(".")[0]
    assert table == kept.page(kept.rows(), SEED, date).strip()
    assert not re.findall(r"\.py:\d", table)  # lines move: 20 of 26 had


@pytest.mark.slow
def test_forty_mutants_and_the_faults_that_engine_and_reference_share_are_noticed(tmp_path):
    command = [sys.executable, "-m", "tests.code_mutants", "sample", "--work", str(tmp_path)]
    done = subprocess.run(command, cwd=kept.ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
