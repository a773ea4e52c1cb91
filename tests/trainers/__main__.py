"""`python -m tests.trainers torchtitan`: advise's plan in a trainer, beside plain training of the trainer's own model.

    python -m tests.trainers                     all of them, and the table of docs/torch_runtime.md; some minutes each
    python -m tests.trainers torchtitan deepspeed

An environment for each is made, with its packages from an index, and removed; torch is that of this environment. The
plan is the first row that `rpbench advise` prints for the trainer's model on two devices, by its `export` command.
"""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.torch_versions import PAGE, ROOT, make_environment, write_table

BEGIN, END = "<!-- trainers -->", "<!-- end of trainers -->"
RANKS, RUN_S = 2, 900
SIZES = {
    "num_layers": 6,
    "hidden": 256,
    "heads": 16,
    "inner": 768,
    "vocab": 2048,
    "seq_len": 32,
}  # torchtitan's debug model
STEP = ("num_microbatches=8", "workload.microbatch_sequences=1")  # advice takes two large ones for so small a model
Options = dict[str, Any] | list[int] | str


@dataclass(frozen=True)
class Trainer:
    """What is known of one.

    Args:
        packages: to install; the first is the trainer's own.
        schedules: that it can run, of which advice takes one.
        form: of our export.
        read: the text of an export, and the table's path -> its options.
    """

    packages: tuple[str, ...]
    schedules: str
    form: str
    read: Callable[[str, str], Options]


def _titan(text: str, table: str) -> Options:
    return tomllib.loads(text.split("# --- automodel\n")[0])["parallelism"] | {"pipeline_parallel_schedule_csv": table}


def _automodel(text: str, table: str) -> Options:
    lines = text.split("# --- automodel\n")[1].splitlines()
    return tomllib.loads("\n".join(line.removeprefix("# ") for line in lines)) | {"pp_schedule_csv": table}


TRAINERS = {
    "torchtitan": Trainer(("torchtitan", "triton"), "zb_v,v_half", "torchtitan", _titan),
    "automodel": Trainer(("nemo-automodel",), "zb_v,v_half", "torchtitan", _automodel),
    "deepspeed": Trainer(
        ("deepspeed", "transformers"), "1f1b", "deepspeed_parts", lambda text, table: list(json.loads(text))
    ),
    "megatron": Trainer(
        ("megatron-core",),
        "interleaved_1f1b",
        "megatron_layout",
        lambda text, table: re.findall(r"-layout (\S+)", text)[0],
    ),
}


def plan_of(trainer: Trainer, folder: Path) -> dict[str, Any]:
    """What advice comes to for a trainer's model, as its program is told."""
    words = [f"{key}={value}" for key, value in SIZES.items()]
    where = ("gpu=l40s", f"num_devices={RANKS}", "sequences_per_step=8", f"schedules={trainer.schedules}", "seconds=3")
    row = json.loads(_rpbench("advise", *words, *where))["ranking"][0]
    known = [word.partition("=")[0] for word in ("format=", *STEP)]
    asked = [word for word in shlex.split(row["export"])[3:] if word.partition("=")[0] not in known] + [*STEP]
    chosen = dict(word.lstrip("+").split("=", 1) for word in asked if "=" in word)
    table = folder / "schedule.csv"
    if trainer.form == "torchtitan":
        table.write_text(_rpbench(*asked, "format=torch_csv"))
    return {
        "schedule": row["schedule"],
        "partition": chosen["partition"].strip("\"'"),
        "num_microbatches": int(chosen["num_microbatches"]),
        "microbatch_sequences": int(chosen["workload.microbatch_sequences"]),
        "options": trainer.read(_rpbench(*asked, f"format={trainer.form}"), str(table)),
        **SIZES,
    }


def _rpbench(*words: str) -> str:
    line = [sys.executable, "-m", "rpbench", *words]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def tried(name: str) -> dict[str, Any]:
    """A trainer in an environment of its own: what its program answers, or what was said instead."""
    trainer = TRAINERS[name]
    with tempfile.TemporaryDirectory(prefix="rpbench-trainer-") as folder:
        plan = plan_of(trainer, Path(folder))
        python = make_environment(Path(folder, "env"), trainer.packages, torch_of_here=True)
        version = subprocess.run(
            [str(python), "-c", f"from importlib.metadata import version; print(version('{trainer.packages[0]}'))"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        ran = subprocess.run(
            [
                *(str(python), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)),
                *("-m", f"tests.trainers.with_{name}", json.dumps(plan)),
            ],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu"},
            capture_output=True,
            text=True,
            timeout=RUN_S,
            check=False,
        )
    row = {"trainer": trainer.packages[0], "version": version, **plan}
    answers = re.findall(r"^ANSWER (.*)$", ran.stdout, re.MULTILINE)
    if not answers:
        return row | {"said": (ran.stdout + ran.stderr)[-3000:]}
    return row | json.loads(answers[-1])


def as_table(rows: Sequence[dict[str, Any]]) -> str:
    """Rows as the page has them."""
    torch = ", ".join(sorted({row["torch"] for row in rows if "torch" in row}))
    lines = [
        f"{datetime.now(UTC):%-d %B %Y}, torch {torch}, two processes over gloo on CPUs, float32. The largest",
        "difference from plain training of the trainer's own model: of the losses of ten clipped steps, of any",
        "gradient of the first, of the norm as the trainer takes it, and of that from one norm of all gradients.",
        "",
        "| trainer | plan | loss | gradient | norm | one norm |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        plan = f"{row['schedule']}, {row['partition']}, {row['num_microbatches']} microbatches"
        figures = [f"{row[key]:.1e}" if row[key] else "0" for key in FIGURES] if "losses" in row else []
        cells = " | ".join(figures) if figures else f"{_said(row)} | | | "
        lines.append(f"| {row['trainer']} {row['version']} | {plan} | {cells} |")
    return "\n".join(lines)


FIGURES = ("loss_diff", "grad_diff", "norm_diff", "norm_diff_one_norm")


def _said(row: dict[str, Any]) -> str:
    placed = f"its ranks build layers `{row['layers']}`; a step says " if "layers" in row else "says "
    return f"{placed}`{row['said'].strip().splitlines()[-1]}`"


def main() -> int:
    """0 if every trainer that runs on CPUs has the gradients of its plain training, bit for bit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trainers", nargs="*", choices=[[], *TRAINERS])
    names = parser.parse_args().trainers or list(TRAINERS)
    rows = []
    for name in names:
        rows.append(tried(name))
        print(json.dumps(rows[-1]), flush=True)
    table = as_table(rows)
    print(table)
    if names == list(TRAINERS):
        write_table(table, PAGE, BEGIN, END)
    return int(any(row.get("grad_diff", 0 if "layers" in row else 1) for row in rows))


if __name__ == "__main__":
    sys.exit(main())
