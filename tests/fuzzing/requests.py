"""Wrong requests: command lines with wrong words, files that are none, and folders of a stranger, one process each.

    python -m tests.fuzzing.requests --number 1000 --seed 1

Each runs in a fork of a process that has everything imported, with a folder of its own. A request may be answered, or
refused with status 2 and a sentence. A traceback, an exit without a word, another status, more than two seconds of
processor time or a gigabyte on the way to a refusal are findings.
"""

import argparse
import json
import os
import random
import resource
import shlex
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from itertools import islice
from pathlib import Path

from analysis.verbs import VERBS
from rpbench.__main__ import dispatch
from rpbench.cli import register

from .bending import CANARY, NUMBERS, WORDS
from .documents import DEEPSEEK, EXPERIMENT, LLAMA, QWEN, TRAIN

SECONDS, MEMORY_BYTES, PATIENCE_S = 2.0, 2**30, 120.0  # patience: of processors, and without any
SMALL = ("num_devices=2", "num_microbatches=2")
PLAIN = ("schedule=1f1b", *SMALL, "cost=constant", "results_dir=out")
LINES: tuple[tuple[str, ...], ...] = (
    PLAIN,
    ("schedule=roundpipe", *SMALL, "cost=analytic", "model=qwen3_1p7b", "cluster=8x_rtx4090", "recompute=all"),
    (*TRAIN, "schedule=1f1b", "num_steps=1", "optimizer.learning_rate=0.1", "optimizer.weight_decay=0.0", "seed=1"),
    ("backend=torch", "schedule=gpipe", *TRAIN[1:], "num_steps=1", "mode.timeout_s=5"),
    ("-m", "--dry-run", "schedule=gpipe,1f1b", *SMALL, "cost=constant", "results_dir=out"),
    ("show", "schedule=zb_h1", "num_devices=3", "num_microbatches=4", "format=text"),
    ("show", "schedule=1f1b", *SMALL, "format=torch_csv", "check=communication"),
    ("plan", "schedule=1f1b", *SMALL, "cost=constant", "plan=search"),
    ("plan", "mesh=search", "model=llama3_8b", "cluster=dgx_h100", "sequences_per_step=16", "seq_len=4096"),
    ("advise", "model=tiny_gpt", "gpu=rtx4090", "num_devices=2", "sequences_per_step=4"),
    ("compare", "a", "b", "results_dir=out"),
    ("explain", "a", "tokens_per_s=100", "results_dir=out"),
    ("query", "select 1", "results_dir=out"),
    ("pivot", "--rows", "model", "--columns", "schedule", "--value", "makespan_s", "results_dir=out"),
    ("export", "--format", "jsonl", "results_dir=out"),
    ("list", "models", "--json"),
    ("schedule=1f1b", "model=llama3_8b", "cluster=dgx_h100", "mesh.pipeline=8", "num_microbatches=8", "cost=analytic"),
)
KEYS = (
    "num_devices", "num_microbatches", "num_steps", "seed", "recompute", "schedule", "model", "cluster", "cost",
    "backend", "mode", "workload", "optimizer", "mesh", "software", "model.num_layers", "model.hidden", "model.heads",
    "model.vocab", "model.seq_len", "model.key_value_heads", "model.experts.total", "model.tied", "model.name",
    "workload.microbatch_sequences", "workload.lengths", "cost.forward_ms", "cost.hop_ms",
    "cluster.device_memory_bytes",
    "cluster.num_devices", "cluster.device_speeds", "optimizer.learning_rate", "optimizer.clip_norm", "mesh.pipeline",
    "mesh.data", "mesh.tensor", "partition", "offload", "precision", "verify", "save_timeline", "results_dir",
    "num_warmup_runs", "num_runs", "schedule.chunks", "schedule.asynchronous", "experiment", "name", "tags", "wandb",
)  # fmt: skip
FILES: tuple[tuple[str, ...], ...] = (
    (*PLAIN[1:], "schedule_file={}"),
    ("show", "schedule_file={}"),
    ("show", "check=communication", "schedule_file={}"),
    (*PLAIN, "model=tiny_gpt", "cost=profiled", "cost.profile={}"),
    (*TRAIN, "schedule=1f1b", "workload=text", "workload.path={}"),
    (*TRAIN, "schedule=1f1b", "checkpoint.resume_from={}"),
    (*PLAIN, "workload.lengths={}"),
    ("advise", "model={}", "gpu=rtx4090", "num_devices=2"),
    ("plan", "plan=pipedream", "profile={}", "edges={}", "num_machines=2", "bandwidth_bytes_per_s=1e9"),
    ("import", "csv", "{}", "results_dir=out"),
    ("import", "kineto", "{}", "results_dir=out"),
    ("import", "wandb", "{}", "results_dir=out"),
    ("export", "--format", "csv", "results_dir={}"),
    ("export", "--format", "parquet", "results_dir=out", "out={}"),
    ("report", "results_dir={}", "out=page"),
    ("dashboard", "results_dir={}", "port=0"),
    (*PLAIN[:-1], "results_dir={}"),
    (*PLAIN, "cluster={}"),
    (*PLAIN, "model={}"),
)
SPECIAL = ("/proc/kmsg", "fifo", "/dev/zero", "/dev/random", "/dev/full", "socket", "/proc/self/mem", "/proc/x", ".",
           "link", "absent", "closed", "/dev/null", "/proc/kpagecount", "empty", "huge", "nul.csv", "doubled.json",
           "latin.txt", "/dev/stdin", "-", "~", "a" * 300, "sound.csv/x")  # fmt: skip
HYDRA = (
    "hydra.launcher._target_=os.system", "hydra.sweeper._target_=subprocess.Popen", "hydra.launcher={}",
    "+hydra.callbacks.x._target_=os.system", "hydra.callbacks={a: {_target_: os.system}}", "hydra/launcher=joblib",
    "++hydra.sweeper._target_=builtins.eval", "hydra.searchpath=[file:///etc]", "hydra.run.dir=/proc/x", "hydra=null",
    "hydra.job.chdir=true", "hydra.job.env_set={LD_PRELOAD: /x}", "hydra.output_subdir=/etc", "--config-dir=/proc",
    "hydra.job_logging={version: 1, handlers: {a: {(): os.system, command: id}}}", "--config-path=../..", "--info",
    "hydra.job_logging.handlers.console._target_=os.system", "--config-name=../../etc/passwd", "--run",
    "hydra.sweeper.params={seed: '1,2'}", "hydra.mode=MULTIRUN", "hydra.verbose=[a]", "--cfg=hydra", "--package=x",
    "--shell-completion", "--hydra-help",
    "hydra.launcher.x._target_=os.system", "+cost._target_=os.system", "model._target_=os.system",
    "+_target_=os.system",
    "hydra.sweep.dir=${oc.env:RPBENCH_CANARY}", "hydra.env._target_=os.abort", "--experimental-rerun=x", "~hydra",
    "hydra",
)  # fmt: skip
YAML = (
    "!!python/object/apply:os.system ['touch owned']", "a: &a [1]\nb: &b [*a, *a]\n" * 2, "a: " + "[" * 5000,
    "name: ../../escaped", "name: x\nname: y", "- 1\n- 2", "", "just words", "name: \x00", "a: 1: 2", "defaults: 7",
    "defaults:\n  - ../../../../etc/passwd", "_target_: os.system\ncommand: id", "name: ${oc.env:RPBENCH_CANARY}",
    "num_layers: 1e999", "num_layers: " + "9" * 500, "num_layers: -3", "num_layers: [1]", "num_layers: 2024-01-01",
    "name: x\nhidden: .nan", "name: {a: {b: ${.c}}}", "name: ${name}", "? [a]\n: b", "a: !!binary x", "<<: *nothing",
    "hydra: {launcher: {_target_: os.system}}", "path: [/dev/zero, ..]",
    "# @package hydra\nlauncher: {_target_: os.system}",
    "name: \ud7ff", "%TAG ! x", "name: !!set {a, b}", "schedule: ???", "name: ???\nnum_layers: ???",
    "- &a [*a]", "1: 2",
)  # fmt: skip
GROUPS = ("model", "cluster", "cost", "experiment", "schedule", "workload", "gpu", "software", "mode")


@dataclass
class Wrong:
    """A command line, and what lies in its folder by name."""

    words: list[str]
    files: dict[str, bytes] = field(default_factory=dict)

    def __str__(self) -> str:
        there = "".join(f"\n    {name}: {content[:200]!r}" for name, content in self.files.items())
        return shlex.join(self.words)[:600] + there


def drawn(seed: int) -> Iterator[Wrong]:
    """Wrong requests without an end."""
    chance = random.Random(f"requests {seed}")
    makers = (_words, _words, _words, _special, _special, _hydra, _own, _documents)
    while True:
        yield chance.choice(makers)(chance)


def _value(chance: random.Random) -> str:
    known = (*WORDS, *map(str, NUMBERS[:13]), *map(repr, NUMBERS[13:]), "[1,1", "{a:", "1,2", "a b", "=", "[]", "[[1]]")
    return chance.choice(known).replace("\x00", "")


def _words(chance: random.Random) -> Wrong:
    """One to three words of a sound command line changed, doubled, gone or added."""
    words = list(chance.choice(LINES))
    for _ in range(chance.choice((1, 1, 2, 3))):
        at = chance.randrange(len(words))
        key, equals, value = words[at].partition("=")
        new = chance.choice((
            [f"{key}{equals}{_value(chance)}"] if equals else [_value(chance)],
            [words[at], f"{chance.choice(KEYS)}={_value(chance)}"],
            [words[at], f"{chance.choice(('+', '++', '~', ''))}{chance.choice(KEYS)}={_value(chance)}"],
            [f"{key[:-1]}{equals}{value}"], [f"{key}x{equals}{value}"], [words[at]] * 2, [],
            [words[at], _value(chance)], [f"{key}.x{equals}{value}"], [f"{key}{equals}{value},{_value(chance)}"],
        ))  # fmt: skip
        words[at : at + 1] = new
        words = words or [""]
    return Wrong([word for word in words if "experiment=" not in word or "/" in word])


def _special(chance: random.Random) -> Wrong:
    line, name = chance.choice(FILES), chance.choice(SPECIAL)
    return Wrong([word.format(name) if "{}" in word else word for word in line])


def _hydra(chance: random.Random) -> Wrong:
    line = chance.choice((PLAIN, LINES[2], LINES[4], ("-m", "schedule=gpipe,1f1b", *PLAIN[1:])))
    return Wrong([*line, *chance.sample(HYDRA, chance.choice((1, 1, 2)))])


def _own(chance: random.Random) -> Wrong:
    """A stranger's folder of options, or their `rpbench.yaml`."""
    content = chance.choice(YAML).encode("utf-8", "surrogatepass")
    if chance.random() < 0.2:
        return Wrong(list(chance.choice((PLAIN, ("list", "models")))), {"rpbench.yaml": content})
    group = chance.choice(GROUPS)
    if group == "experiment" and chance.random() < 0.5:
        content = EXPERIMENT + content
    words = ["--dry-run", "-m"] if group == "experiment" else []
    there = {f"mine/{group}/bent.yaml": content, "rpbench.yaml": b"path: [mine]\n"}
    return Wrong([*words, *PLAIN[: 4 if group != "cost" else 3], "results_dir=out", f"{group}=bent"], there)


def _documents(chance: random.Random) -> Wrong:
    """JSON with a key twice or a value that cannot be; CSV with NUL, odd ends and many columns."""
    if chance.random() < 0.6:
        sizes = chance.choice((LLAMA, QWEN, DEEPSEEK))
        key = chance.choice(list(sizes))
        odd = chance.choice(("null", "[]", "-1", "1e999", "NaN", "9" * 400, '"x"', "1000000000", "{}", "true", "0.5"))
        whole = json.dumps(sizes)
        text = whole[:-1] + f', "{key}": {odd}}}' if chance.random() < 0.3 else json.dumps(sizes | {key: "ODD"})
        content = text.replace('"ODD"', odd).encode()
        gpu = ("gpu=rtx4090", "num_devices=2", "sequences_per_step=2")
        return Wrong(["advise", "model=config.json", *gpu], {"config.json": content})
    rows = chance.choice((b"0F0,0B0\n1F0,1B0\n", b"schedule,model,makespan_s\ngpipe,a,1\n", b"a,b\n" * 9, b","))
    bent = chance.choice(
        (b"\x00", b"\r", b'"', b"," * 5000, b"\xff", b"-1", b"9" * 5000, b"\n\n", b"=1+1", b"\xef\xbb\xbf")
    )
    at = chance.randrange(len(rows) + 1)
    line = chance.choice([each for each in FILES if any("{}" in word for word in each)][:-4])
    return Wrong([word.replace("{}", "bent.csv") for word in line], {"bent.csv": rows[:at] + bent + rows[at:]})


# --- one request, in a process of its own ------------------------------------------------------------------------


def problem_of(wrong: Wrong, folder: Path) -> str:
    """What is wrong with the answer to a request; empty for nothing."""
    _lay(wrong, folder)
    said = folder / "said.txt"
    began = time.monotonic()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    child = os.fork()
    if child == 0:
        _be_asked(wrong, folder, said)
    ended, status, used = os.wait4(child, os.WNOHANG)
    moved, spent = began, 0.0
    while not ended and time.monotonic() - moved < PATIENCE_S and spent < PATIENCE_S and not _serves(wrong, said):
        time.sleep(0.01 if time.monotonic() - began < 1 else 0.2)
        if (now := _spent(child)) > spent:
            moved, spent = time.monotonic(), now
        ended, status, used = os.wait4(child, os.WNOHANG)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if not ended:
        os.waitpid(child, 0)
        if _serves(wrong, said):
            return ""
        waited = time.monotonic() - moved
        words = said.read_text(errors="replace")[-300:]
        return f"no answer in {spent:.0f} s of processors, {waited:.0f} s without any: {words}"
    words, seconds = said.read_text(errors="replace"), used.ru_utime + used.ru_stime
    code = os.waitstatus_to_exitcode(status)
    grown = 1024 * (used.ru_maxrss - before)
    found = [
        ("a traceback", "Traceback (most recent call last)" in words),
        (f"status {code}", code not in (0, 2)),
        ("not a word", code == 2 and not words.strip()),
        (f"{seconds:.1f} s", code == 2 and seconds > SECONDS),
        (f"{grown / 1e6:.0f} MB", grown > MEMORY_BYTES),
        ("a secret", CANARY in words and not any("RPBENCH_CANARY" in word for word in wrong.words)),
        ("code of a stranger ran", (folder / "owned").exists()),
        ("a file outside", (folder.parent / "escaped").exists() or (folder / "escaped").exists()),
    ]
    what = ", ".join(name for name, is_so in found if is_so)
    return what and f"{what}: {words[-1500:]}"


def _spent(group: int) -> float:
    """Seconds that the processors gave a process group so far, those of ended children included."""
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15])) if int(fields[2]) == group else 0
    return ticks / os.sysconf("SC_CLK_TCK")


def _serves(wrong: Wrong, said: Path) -> bool:
    """Whether a page is served, which ends with whoever asked for it."""
    return wrong.words[:1] == ["dashboard"] and said.exists() and '{"dashboard":' in said.read_text(errors="replace")


def _lay(wrong: Wrong, folder: Path) -> None:
    files = {
        "empty": b"", "nul.csv": b"0F0,\x00\n1F0,1B0\n", "doubled.json": b'{"a": 1, "a": 2}', "latin.txt": b"caf\xe9",
        "sound.csv": b"0F0,0B0\n1F0,1B0\n", "closed": b"1",
    }  # fmt: skip
    for name, content in (files | wrong.files).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    os.mkfifo(folder / "fifo")
    (folder / "link").symlink_to("link")
    with (folder / "huge").open("wb") as file:
        file.truncate(2**40)
    with socket.socket(socket.AF_UNIX) as waiting:
        os.chdir(folder)
        waiting.bind("socket")
    (folder / "closed").chmod(0)


def _be_asked(wrong: Wrong, folder: Path, said: Path) -> None:
    """In the fork: the request, with its words into a file."""
    status = 70
    try:
        os.setsid()
        os.chdir(folder)
        for stream, path, mode in ((0, os.devnull, os.O_RDONLY), (1, said, os.O_WRONLY | os.O_CREAT), (2, said, 1)):
            os.dup2(os.open(path, mode | (os.O_APPEND if stream else 0), 0o600), stream)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        status = dispatch(wrong.words)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def findings(seed: int, number: int, first: int = 0) -> Iterator[tuple[Wrong, str]]:
    """Requests that were answered badly, with how; `number` of them from the first on."""
    for name in ("analysis.report", "analysis.dashboard.server", "duckdb", "rpbench.engine.training"):
        import_module(name)  # these take seconds of every process, whatever it is asked

    register(VERBS)
    os.environ["RPBENCH_CANARY"] = CANARY
    here = Path.cwd()
    for place, wrong in enumerate(islice(drawn(seed), first, first + number), first):
        with tempfile.TemporaryDirectory(prefix="asked-") as name:
            folder = Path(name) / "a" / "b"
            folder.mkdir(parents=True)
            problem = problem_of(wrong, folder)
            os.chdir(here)
        if problem:
            yield wrong, f"({seed}, {place}) {problem}"


def main() -> int:
    """Ask, and print what was answered badly."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzzing.requests", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--number", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="the place of the first one, to go on from there")
    asked = parser.parse_args()
    kinds = Counter[str]()
    for wrong, problem in findings(asked.seed, asked.number, asked.first):
        kinds[problem.partition(") ")[2].partition(":")[0]] += 1
        print(f"== {wrong}\n   {problem}\n", flush=True)
    what = f"{asked.number} requests from {asked.first} with seed {asked.seed}"
    print(f"{what}: {sum(kinds.values())} answered badly {dict(kinds)}")
    return 1 if kinds else 0


if __name__ == "__main__":
    sys.exit(main())
