"""Records to draw and judge from.

`results` and `records` are real: the 25 runs of figure 17 and the closed forms, made in this process. `full_results`
and `full_records` add what takes long to run (calls back to back, searched cuts) as edited copies of them, so that
every exhibit has its rows; their values are made up.
"""

import copy
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import pandas as pd
import pytest

from analysis.exhibits.figures import convergence, gains, thousand_devices, what_if
from analysis.exhibits.figures.duel import NAMES
from analysis.exhibits.tables import comparison
from analysis.records.published import load_records
from analysis.records.runs import MODELS, ONE_ROUND, SCHEDULES
from rpbench.harness import record
from rpbench.harness.config import RunConfig, as_plain, load, swept
from rpbench.harness.record import Record
from rpbench.harness.run import run

CLUSTERS = ("8x_rtx4090", "8x_a800", "8x_rtx5090", "8x_h100")


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results folder of figure 17, with timelines, and of the closed forms; parallel workers share it."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "analysis_results"
    for config in (*_figure17(), *_roofline(), *_atlas()):
        run(replace(config, results_dir=str(folder)))
    return folder


@pytest.fixture(scope="session")
def records(results: Path) -> pd.DataFrame:
    """The records of `results`."""
    return load_records(results)


@pytest.fixture(scope="session")
def full_results(results: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`results` with made-up records of all other experiments."""
    folder = tmp_path_factory.mktemp("full") / "results"
    shutil.copytree(results, folder)
    rows = list(record.read_all(results))
    first = next(row for row in rows if row["cost"] == "published")
    for row in rows:
        for other in (*_others(row), *_compared(row), *_real_runs(row), *(_made_once(row) if row is first else ())):
            (folder / other["run_id"]).mkdir()
            (folder / other["run_id"] / "record.json").write_text(record.dump(other))
    return folder


@pytest.fixture(scope="session")
def full_records(full_results: Path) -> pd.DataFrame:
    """The records of `full_results`."""
    return load_records(full_results)


# Composing takes longer than running: a file is read once, and configurations are put together from its parts.


def _figure17() -> Iterator[RunConfig]:
    models = {name: load(["experiment=figure17", f"model={name}"]) for name in MODELS}
    schedules = {name: load([f"schedule={name}"]).schedule for name in SCHEDULES}
    for schedule, model in product(SCHEDULES, MODELS):
        yield replace(models[model], schedule=dict(schedules[schedule]))


def _roofline() -> Iterator[RunConfig]:
    base = load(["experiment=roofline"])
    models = {name: load([f"model={name}"]).model for name in MODELS}
    clusters = {name: load([f"cluster={name}"]).cluster for name in CLUSTERS}
    for model, cluster, convention in product(MODELS, CLUSTERS, ("artifact", "corrected")):
        backend = base.backend | {"convention": convention}
        yield replace(base, model=dict(models[model]), cluster=dict(clusters[cluster]), backend=backend)


def _atlas() -> Iterator[RunConfig]:
    base = load(["experiment=atlas"])
    for name in swept("atlas", "schedule"):
        yield replace(base, schedule=load([f"schedule={name}"]).schedule)


def _others(row: Record) -> Iterator[Record]:
    """Records of the other experiments, made up from one of figure 17."""
    if row["cost"] != "published":
        return
    for number, cut in enumerate(("even", "greedy", "search"), start=1):
        yield _edited(row, f"{cut}", partition=cut, makespan_s=row["makespan_s"] * (1 - 0.01 * number))
    if row["schedule"] == "roundpipe":
        late = _edited(row, "causal", makespan_s=1.01 * row["makespan_s"])
        late["config"]["cost"]["fused_ahead"] = False
        yield late
        whole = _edited(row, "one round", partition="search", makespan_s=0.95 * row["makespan_s"])
        whole["config"]["schedule"]["round_size"] = row["num_microbatches"]
        yield whole
        yield from (_back_to_back(row, count) for count in (8, 9, 10, 16))
        yield from (_dealt(row, size) for size in (1, 4, 8))
    else:
        ahead = _edited(row, "ahead", partition="search", makespan_s=0.9 * row["makespan_s"])
        ahead["config"]["cost"]["recompute_ahead"] = True
        yield ahead


def _made_once(row: Record) -> Iterator[Record]:
    """Records that need no more of a row than its form."""
    yield from _trained(row)
    yield from _what_if(row)
    yield from _of_unit_work(row)
    yield from _gains(row)


def _gains(row: Record) -> Iterator[Record]:
    """Records of all schedules on the paper's models; RoundPipe's rate is 90 or 100, that of the others 80 and more."""
    for name in (gains.FLUSHING, gains.ASYNCHRONOUS):
        base = load([f"experiment={name}"])
        for (rank, schedule), model in product(enumerate(swept(name, "schedule")), MODELS):
            rates = {"roundpipe": 90, ONE_ROUND: 100}
            config = as_plain(base)
            yield _edited(
                row,
                f"{name} {schedule} {model}",
                schedule=_registered(schedule, config, base.num_microbatches),
                model=model,
                config=config,
                partition=base.partition,
                peak_memory_bytes=[rank << 31] * 8,
                tokens_per_s=rates.get(schedule, 80 + 1.5 * rank),
            )
    late = as_plain(load(["experiment=steady_causal"]))
    late["schedule"]["round_size"] = gains.NUM_MICROBATCHES
    for model in MODELS:
        yield _edited(
            row,
            f"steady causal {model}",
            schedule="roundpipe",
            model=model,
            config=late,
            num_steps=60,
            num_microbatches=gains.NUM_MICROBATCHES,
            tokens_per_s=120,
            bubble_steady=0.01,
        )


def _registered(schedule: str, config: Record, num_microbatches: int) -> str:
    """The registered name of a swept schedule; the size of its rounds goes into the config."""
    size = num_microbatches if schedule == ONE_ROUND else None
    config["schedule"] = config["schedule"] | {"round_size": size}
    return "roundpipe" if schedule == ONE_ROUND else schedule


def _of_unit_work(row: Record) -> Iterator[Record]:
    """Records of the experiments that compare schedules as such; the later its name, the larger a bubble."""
    axes = {"tradeoff": "num_microbatches", "hop_latency": "cost.hop_ms", "uneven_head": "cost.head_share"}
    axes |= dict.fromkeys(thousand_devices.EXPERIMENTS, "num_devices")
    for name, axis in axes.items():
        base = load([f"experiment={name}"])
        for (rank, schedule), value in product(enumerate(swept(name, "schedule")), swept(name, axis)):
            config = as_plain(base)
            fields = {"model": base.model["name"], "num_microbatches": base.num_microbatches}
            of_costs = axis.startswith("cost.")
            (config["cost"] if of_costs else fields)[axis.removeprefix("cost.")] = value
            yield _edited(
                row,
                f"{name} {schedule} {value}",
                schedule=_registered(schedule, config, fields["num_microbatches"]),
                config=config,
                cost="constant",
                cluster="local",
                partition=base.partition,
                peak_in_flight=[8 + rank] * 8,
                bubble_makespan=0.01 * (rank + value),
                bubble_span=0.005 * (rank + value),
                **fields,
            )


def _what_if(row: Record) -> Iterator[Record]:
    """Records of the two what-if experiments: the copies decide on the left, the devices on the right."""
    for x, y, (rank, system) in product(what_if.COPY_RATES, what_if.VOCABULARIES, enumerate(what_if.SYSTEMS)):
        point = _predicted(row, system, f"{x} {y}", 1000.0 * (4 - rank if x > 1e9 else 1 + rank))
        point["config"]["cluster"]["copy_bytes_per_s"], point["config"]["model"]["vocab"] = x, y
        point["config"]["workload"] |= {"sequences": 1, "microbatches": 16}
        yield point
    for x, y, (rank, system) in product(what_if.DEVICES, what_if.MICROBATCHES, enumerate(what_if.SYSTEMS)):
        point = _predicted(row, system, f"{x} devices {y}", 1000.0 * (4 - rank), num_devices=x)
        point["config"]["num_devices"] = x
        point["config"]["workload"] |= {"sequences": 4, "microbatches": y}
        yield point


def _predicted(row: Record, system: str, why: str, rate: float, **fields: object) -> Record:
    return _edited(
        row,
        f"what if {system} {why}",
        workload="paper",
        cost="analytic",
        evidence="predicted",
        system=system,
        tokens_per_s=rate,
        tokens_per_s_low=0.9 * rate,
        tokens_per_s_high=1.1 * rate,
        memory_margin=0.5,
        **fields,
    )


def _trained(row: Record) -> Iterator[Record]:
    """Records of `experiment=convergence`: losses that fall, some faster."""
    for number, method in enumerate(convergence.METHODS):
        config = as_plain(load(["experiment=convergence", f"method={method}"]))
        points = config["num_steps"]
        for seed in convergence.SEEDS:
            yield _edited(
                row,
                f"{method} {seed}",
                status="ok",
                schedule=config["schedule"]["name"],
                workload="prose",
                backend="virtual",
                num_devices=4,
                num_microbatches=config["num_microbatches"],
                seed=seed,
                config=config | {"seed": seed},
                tokens_per_step=1024,
                num_updates=points,
                staleness_steps=1,
                weight_versions=2,
                loss_curve=[5.5 - (2.5 + 0.1 * number + 0.01 * seed) * point / points for point in range(points)],
                tokens_per_s=1024.0 * points,
                loss_curve_s=[(1 + 0.1 * number) * (point + 1) / points for point in range(points)],
            )


def _back_to_back(row: Record, count: int) -> Record:
    bubble = 0.4 / count
    step_time_s = sum(row["busy_s"]) / row["num_devices"] * count / row["num_microbatches"] / (1 - bubble)
    tokens = row["tokens_per_step"] * count // row["num_microbatches"]
    steady = _edited(
        row,
        f"steady {count}",
        num_steps=60,
        num_microbatches=count,
        bubble_steady=bubble,
        step_time_s=step_time_s,
        tokens_per_step=tokens,
        tokens_per_s=tokens / step_time_s,
    )
    steady["config"]["schedule"] |= {"round_size": count, "asynchronous": True}
    return steady


def _dealt(row: Record, size: int) -> Record:
    dealt = _edited(
        row,
        f"dealt {size}",
        dispatch="dynamic",
        makespan_s=(0.9 + 0.01 * size) * row["makespan_s"],
        bubble_makespan=0.01 * size * row["bubble_makespan"],
    )
    dealt["config"]["cost"]["fused_ahead"] = False
    dealt["config"]["schedule"]["round_size"] = size
    return dealt


def _real_runs(row: Record) -> Iterator[Record]:
    """Records of the duels and of runs compared with plain training, made up from a cell of figure 17."""
    if (row["cost"], row["schedule"], row["model"]) != ("published", "gpipe", MODELS[0]):
        return
    for model, (number, contender) in product(("mid_gpt", "fat_head_gpt"), enumerate(NAMES)):
        yield _contender(row, model, contender, 2 - 0.1 * number)
    for backend, dtype in product(("virtual", "cpu"), ("float64", "float32", "bfloat16")):
        yield _verified(row, backend, dtype)


def _compared(row: Record) -> Iterator[Record]:
    """Records of `experiment=figure10` and `experiment=baselines_cpu`, made up from cells of figure 17."""
    if (row["cost"], row["schedule"]) != ("published", "1f1b"):
        return
    systems = [*((name, False) for name in swept("figure10", "schedule")), *comparison.OPTIONS.values()]
    for number, (name, late) in enumerate(systems):
        sizes = {"cluster": "8x_rtx4090", "num_steps": 4, "tokens_per_s": 1000.0 + number}
        made = _system(row, name, f"on eight {name} {late}", staleness_steps=int(late or name == "pipedream"), **sizes)
        made["config"] |= {"charge": "bytes", "schedule": {"name": name, "asynchronous": late}}
        yield made
    if row["model"] == MODELS[0]:
        for number, name in enumerate(("1f1b", "pipedream", "zero_3")):
            cpu = _system(row, name, f"on two {name}", backend="cpu", model="tiny_gpt", num_devices=2, num_steps=3)
            cpu["config"] |= {"verify": True}
            yield cpu | {"loss": 5.0, "staleness_steps": number, "grad_max_abs_diff": 0.0 if number < 2 else 1e-9}


def _system(row: Record, name: str, why: str, *, num_steps: int, **fields: object) -> Record:
    moved = {"h2d_bytes": [3 * 10**9] * 8, "net_bytes": [6 * 10**9] * 8, "d2h_bytes": [0] * 8}
    found = _edited(
        row,
        why,
        schedule=name,
        num_steps=num_steps,
        bubble_steady=0.25,
        host_memory_bytes=10**9,
        evidence="measured" if "backend" in fields else "simulated",
        **(moved if name.startswith("zero") else {}),
        **fields,
    )
    found["config"] |= {"num_steps": num_steps}
    if name == "data_parallel":
        reason = "device 0 needs 41.6 GB and has 25.8 GB; 24.4 GB of it are optimizer state: take more devices"
        found |= {"status": "infeasible", "reason": reason, "tokens_per_s": None, "bubble_steady": None}
    return found


def _contender(row: Record, model: str, contender: str, seconds: float) -> Record:
    walls = [1.1 * seconds, 1.2 * seconds]
    return _edited(
        row,
        f"duel {model} {contender}",
        backend="duel",
        model=model,
        contender=contender,
        evidence="measured",
        round_size=8 if contender.startswith("roundpipe") else None,
        makespan_s=1.15 * seconds,
        replay_makespan_s=seconds,
        simulated_makespan_s=0.98 * seconds,
        emulated_makespan_s=0.99 * seconds,
        foreign_cpu_share=0.5,
        round_walls_s=walls,
        round_replays_s=[seconds, seconds * (1 + 0.01 * len(contender) / 10)],
        round_cpus_s=[3.0, 3.1],
        calibrated_makespans_s=[0.9 * seconds, 1.1 * seconds, 0.9 * seconds],
        calibration_foreign_cores=[0.5, 0.25, None],
    )


def _verified(row: Record, backend: str, dtype: str) -> Record:
    run = _edited(
        row,
        f"verified {backend} {dtype}",
        backend=backend,
        model="tiny_gpt",
        num_devices=4,
        grad_max_abs_diff=0.0 if dtype != "bfloat16" else 1e-3,
    )
    run["config"] |= {"verify": True, "num_steps": 2, "dtype": dtype}
    return run


def _edited(row: Record, why: str, **fields: object) -> Record:
    other = copy.deepcopy(row) | fields
    return other | {"run_id": record.run_id({"copy of": row["run_id"], "why": why}, row["code_version"])}
