"""How many files a change takes: made in a clone, where the tests of what it touches stay green."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

_SCHEDULE = {
    "baselines/synchronous/short_1f1b.py": '''"""Short 1F1B: ranks hold one microbatch less than in 1F1B.

    rank 0   0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3
    rank 1   1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3
    rank 2   2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3

Source: made up for a test.
"""

from baselines.synchronous.one_f_one_b import alternate
from rpbench.ir.action import joined
from rpbench.ir.schedule import Schedule, Shape, looped_placement
from rpbench.registry import schedule


@schedule("short_1f1b", source="made up for a test")
def short_1f1b(shape: Shape) -> Schedule:
    """Rank r keeps at most max(1, num_ranks - r - 1) microbatches in flight."""
    if shape.num_stages != shape.num_ranks:
        told = f"got {shape.num_stages} on {shape.num_ranks} ranks; set chunks_per_device=1"
        raise ValueError(f"short_1f1b puts one stage on each rank, {told}")
    rows = tuple(
        joined([alternate(rank, batch, max(0, shape.num_ranks - rank - 2)) for batch in shape.batches])
        for rank in range(shape.num_ranks)
    )
    return Schedule(shape, rows, name="short_1f1b", placement=looped_placement(shape))
''',
    "tests/schedules/test_short_1f1b.py": '''"""Short 1F1B against the drawing of its file."""

from rpbench.ir.schedule import Shape
from rpbench.registry import entry


def test_three_ranks():
    order = entry("short_1f1b").build(Shape(3, 3, 4))
    assert " ".join(map(str, order.compute(0))) == "0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3"
''',
    "docs/methods/short_1f1b.md": """# short_1f1b

<!-- facts of the registry -->

## Idea

1F1B with less in flight.

## What is faithful

- Nothing: it is made up for a test.

## What differs

- Everything.

## The paper's number and ours

**Paper.** None.

**Ours.** None.
""",
}
_EXPERIMENT = {
    "conf/experiment/short_study.yaml": """# @package _global_
# python -m rpbench -m experiment=short_study
# Two orders on one size.
defaults:
  - override /cost: constant
num_devices: 2
hydra:
  sweeper:
    params:
      schedule: gpipe,1f1b
""",
    "analysis/exhibits/tables/short_study.py": '''"""Two orders on one size."""

from analysis.exhibits.exhibit import label, ours, table
from analysis.exhibits.exhibit import Shown, exhibited
from analysis.records.experiments import Experiments


@exhibited("short_study")
def exhibit(experiments: Experiments) -> Shown:
    """Makespans of both."""
    rows = experiments.cells("short_study").to_dict("records")
    cells = ((label(row["schedule"]), ours(row["makespan_s"], ".3f", row["run_id"])) for row in rows)
    return Shown(table(("schedule", "makespan (s)"), cells))
''',
    "analysis/exhibits/exhibits.yaml": """short_study:
  question: Which of two orders is shorter?
  title: Two orders
  caption: Both take as long.
  evidence: [simulated]
  experiments: [short_study]
""",
    "analysis/claims/short_study.py": '''"""What two orders have in common."""

from collections.abc import Iterator

from analysis.claims.claim import Claim, section
from analysis.claims.claim import Need
from analysis.records.published import Printed


@section(place=175)
def claims() -> Iterator[Claim]:
    """One takes as long as the other."""
    yield Claim(
        id="short_study/makespan",
        whose="ours",
        section="Two orders",
        source="experiment=short_study",
        statement="GPipe takes as long as 1F1B",
        metric="quotient of makespans",
        unit="",
        published=Printed("1.000", "closed form: both fill and drain once"),
        evidence="simulated",
        needs=(Need("short_study", {"schedule": "gpipe"}), Need("short_study", {"schedule": "1f1b"})),
        value=lambda gpipe, other: gpipe["makespan_s"] / other["makespan_s"],
    )
''',
}
_LAST_ROW = '    "sum": Charge(lambda stage, sizes: sizes.boundary),\n'
_ROW = """    # The tokens of every expert, which all devices tell each other behind every forward and backward.
    "loads": Charge(lambda stage, sizes: sizes.boundary // 4, ends=frozenset({Kind.F, Kind.B})),
"""
_CHARGE = {
    "tests/cost/test_loads.py": '''"""Loads of experts, as everybody who reads the table of charges sees them."""

import pytest
from contest_terms import small

from rpbench.advice.causes import causes_of
from rpbench.commands.recorded.explain import step_causes
from rpbench.config.loading import load
from rpbench.ir.partition import symmetric
from rpbench.plan.contest.contender import contender
from rpbench.plan.contest.frame import Frame
from rpbench.plan.contest.contender import space_of
from rpbench.run.recording import run

WORDS = ("schedule=gpipe", "num_devices=2", "num_microbatches=4", "num_steps=2", "model=llama32_1b", "cost=analytic")
WORDS += ("model.tied=false",)  # no sum of a matrix at both ends
ENDS = 2 * 4  # forwards and backwards of a device in a step


def test_simulation_memory_and_why(tmp_path):
    bytes_, hops = (load([*WORDS, "cluster=8x_a800", f"charge={word}", f"results_dir={tmp_path}"]) for word in WAYS)
    [charged], [without] = run(bytes_), run(hops)
    each = 2 * bytes_.tokens_per_microbatch * bytes_.model.hidden // 4
    boundaries = 4 * 4 * each  # a device sends one of every microbatch, forth or back
    assert charged["net_bytes"] == [2 * (ENDS * each + boundaries)] * 2
    seconds = ENDS * each / (bytes_.cluster.collective_bytes_per_s or bytes_.cluster.link_bytes_per_s("net"))
    assert step_causes(bytes_)["collectives"] >= seconds
    assert step_causes(hops)["collectives"] == 0
    assert charged["step_time_s"] >= without["step_time_s"] + seconds


WAYS = ("bytes", "hops")


def test_search_and_advice():
    case, cut = small(microbatches=(1,)), symmetric((3, 3))
    who = contender("gpipe")
    frame = Frame(who, space_of(who, case).first, case, cut, case.num_steps)
    why = causes_of(frame, cut, ())
    assert why["collectives"] > 0
    assert sum(why.values()) == pytest.approx(frame.outcome(cut, "all").step_time_s)
    assert frame.memory(cut, (), "all")["loads buffers"] == case.sizes(1).boundary // 4
''',
}
_RUN_AND_SHOW = """
import subprocess, sys
from pathlib import Path
from analysis.claims import all_claims, evaluate
from analysis.exhibits.catalogue import exhibits
from analysis.records.experiments import Experiments
subprocess.run([sys.executable, "-m", "rpbench", "-m", "experiment=short_study"], check=True)
seen = Experiments(Path("results"))
assert "short_study" in [each.id for each in exhibits(seen)[0]]
[verdict] = evaluate([claim for claim in all_claims() if claim.id == "short_study/makespan"], seen)
assert verdict.kind == "reproduced", verdict
"""


def _clone(folder: Path, files: dict[str, str], changed: dict[str, tuple[str, str]] | None = None) -> Path:
    """A clone with new files, and with files in which one text stands in place of another."""
    subprocess.run(["git", "clone", "-q", "--no-hardlinks", str(ROOT), str(folder)], check=True)
    for name, text in files.items():
        assert not (folder / name).exists() or name == "analysis/exhibits/exhibits.yaml"
        with (folder / name).open("a", encoding="utf-8") as file:
            file.write(text)
    for name, (old, new) in (changed or {}).items():
        whole = (folder / name).read_text(encoding="utf-8")
        assert whole.count(old) == 1
        (folder / name).write_text(whole.replace(old, new), encoding="utf-8")
    return folder


def _python(clone: Path, *words: str) -> None:
    paths = {**os.environ, "PYTHONPATH": str(clone)}
    done = subprocess.run([sys.executable, *words], cwd=clone, env=paths, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


def _tests(clone: Path, *chosen: str) -> None:
    _python(clone, "-m", "pytest", "-n", "0", "-q", "-p", "no:cacheprovider", *chosen)


@pytest.mark.slow
def test_a_schedule_takes_three_files(tmp_path):
    assert len(_SCHEDULE) == 3
    clone = _clone(tmp_path / "clone", _SCHEDULE)
    everywhere = ("tests/schedules", "tests/site/test_site_pages.py", "tests/torch_runtime", "tests/run/test_tuned.py")
    _tests(clone, *everywhere, "-k", "short_1f1b or registry or everybody or table_of_methods or kept_table")
    _python(clone, "-m", "rpbench", "show", "schedule=short_1f1b", "num_devices=3", "num_microbatches=4")


@pytest.mark.slow
def test_an_experiment_with_its_exhibit_and_claim_takes_at_most_five_files(tmp_path):
    assert len(_EXPERIMENT) <= 5
    clone = _clone(tmp_path / "clone", _EXPERIMENT)
    _python(clone, "-c", _RUN_AND_SHOW)
    _tests(clone, "tests/config/test_configs.py", "tests/analysis/test_claims.py")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, source, changed, chosen",
    [
        ("gpu/my_card.yaml", "gpu/l40s.yaml", ("name: l40s", "name: my_card"), ("tests/mesh/test_gpu_sheets.py",)),
        (
            "model/my_model.yaml",
            "model/mid_gpt.yaml",
            ("name: mid_gpt", "name: my_model"),
            ("tests/config/test_configs.py",),
        ),
    ],
)
def test_a_device_or_a_model_takes_one_file(name, source, changed, chosen, tmp_path):
    text = (ROOT / "conf" / source).read_text(encoding="utf-8")
    assert changed[0] in text
    clone = _clone(tmp_path / "clone", {f"conf/{name}": text.replace(*changed)})
    _tests(clone, *chosen)
    model, device = ("my_model", "l40s") if "model" in name else ("llama31_8b", "my_card")
    _python(clone, "-m", "rpbench", "advise", f"model={model}", f"gpu={device}", "num_devices=4", "seconds=2")


@pytest.mark.slow
def test_a_communication_charge_takes_at_most_four_files(tmp_path):
    changed = {"rpbench/cost/charges.py": (_LAST_ROW, _LAST_ROW + _ROW)}
    assert len(_CHARGE) + len(changed) <= 4
    clone = _clone(tmp_path / "clone", _CHARGE, changed)
    status = ["git", "status", "--porcelain", "--untracked-files=all"]
    touched = subprocess.run(status, cwd=clone, check=True, capture_output=True, text=True).stdout.splitlines()
    assert len(touched) <= 4, touched
    _tests(
        clone,
        "tests/cost/test_loads.py",
        "tests/cost/test_transfers.py",
        "tests/sim/test_links.py",
        "tests/plan/test_plan.py",
    )
