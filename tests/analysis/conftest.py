"""Records to draw and judge from.

`results` is real: the 25 runs of figure 17, the closed forms and the atlas, made in this process. `full_results` adds
what takes long to run (calls back to back, searched cuts) as edited copies of them, so that every exhibit has its
rows; their values are made up.
"""

import copy
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch_duel_rows
from manifests import Cells, put
from omegaconf import OmegaConf
from report_page import with_images

from analysis.exhibits.figures.duel import MODELS as DUEL_MODELS
from analysis.exhibits.figures.duel import NAMES
from analysis.exhibits.figures.own import convergence, thousand_devices, what_if
from analysis.exhibits.figures.own.turning import LEVELS
from analysis.records import identity
from analysis.records.experiments import Experiments
from analysis.records.published import PUBLISHED_MODELS, look_up
from analysis.records.runs import MODELS, ONE_ROUND
from analysis.report.content import Content
from analysis.report.page import gather, rendered
from rpbench.config.composing import Composer
from rpbench.config.configuration import CONF, composed, swept
from rpbench.config.loading import request_of
from rpbench.config.request import Request
from rpbench.records import record
from rpbench.records.record import Record
from rpbench.run.recording import run


@pytest.fixture(scope="session", autouse=True)
def made_up_records_answer_their_cells() -> Iterator[None]:
    """What is made up is not what its cell asks for; records that were run are held to it."""
    held = identity.problem
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(identity, "problem", lambda row, *cell: None if row.get("made_up") else held(row, *cell))
        yield


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results folder of figure 17, with timelines, and of the closed forms; parallel workers share it."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "analysis_results"
    for experiment in ("figure17", "roofline", "atlas"):
        cells = [(cell, run(replace(request, results_dir=folder))) for cell, request in _requests(experiment)]
        put(folder, experiment, cells)
    return folder


@pytest.fixture(scope="session")
def experiments(results: Path) -> Experiments:
    """The experiments of `results`."""
    return Experiments(results)


@pytest.fixture(scope="session")
def full_results(results: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`results` with made-up records of all other experiments."""
    folder = tmp_path_factory.mktemp("full") / "results"
    shutil.copytree(results, folder, ignore=shutil.ignore_patterns(".*"))  # another worker may be writing
    rows = [row for row in Experiments(results).rows if row["experiment"] == "figure17"]
    for experiment, cells in _made_up(rows).items():
        kept = list(cells)
        for _, made in kept:
            for row in made:
                known = {key: value for key, value in row.items() if key != "surroundings"}  # its run_id is made up
                record.write(folder / row["run_id"], known | {"experiment": experiment})
        put(folder, experiment, kept)
    return folder


@pytest.fixture(scope="session")
def full_experiments(full_results: Path) -> Experiments:
    """The experiments of `full_results`."""
    return Experiments(full_results)


@pytest.fixture(scope="session")
def full_content(full_experiments: Experiments) -> Content:
    """Every exhibit and verdict of `full_results`; nothing is drawn."""
    return gather(full_experiments)


@pytest.fixture(scope="session")
def texts(full_content: Content) -> dict[str, str]:
    """Its pages, as if the figures, which take long to draw, were in their files."""
    return dict(rendered(with_images(full_content), "report.html", "report_pages"))


def _requests(experiment: str) -> Iterator[tuple[dict[str, str], Request]]:
    """Every cell of an experiment, and what it asks for."""
    composer = Composer()
    keys = OmegaConf.load(CONF / "experiment" / f"{experiment}.yaml").hydra.sweeper.params
    for values in product(*(swept(experiment, key) for key in keys)):
        cell = {key: str(value) for key, value in zip(keys, values, strict=True)}
        overrides = [f"{key}={value}" for key, value in cell.items()]
        yield cell, request_of(composer.compose([*overrides, f"experiment={experiment}"]))


# --- made up from the cells of figure 17 -----------------------------------------------------------------------


def _made_up(rows: list[Record]) -> dict[str, Cells]:
    by_cell = {(row["schedule"], row["model"]): row for row in rows}
    first = by_cell["gpipe", MODELS[0]]
    dealt = {model: by_cell["roundpipe", model] for model in MODELS}
    return {
        "partitions": _cuts(by_cell),
        "recompute_ahead": _ahead(by_cell),
        "causal": (({"model": model}, [_waiting(row)]) for model, row in dealt.items()),
        "one_round": (({"model": model}, [_whole(row)]) for model, row in dealt.items()),
        "steady_state": _steady(dealt),
        "steady_causal": _steady(dealt, waits=True),
        "dispatch": _dispatched(dealt),
        **_trained(first),
        **_what_if(first),
        **_of_unit_work(first),
        **_turning(first),
        "goodput": _failing(first),
        "cpu_duel": _duels(first),
        "torch_duel": [({}, _torch_duel(first))],
        "equivalence": _verified_runs(first),
        **_compared(by_cell),
    }


def _cuts(by_cell: Mapping[tuple[str, str], Record]) -> Cells:
    for number, cut in enumerate(("even", "greedy", "search"), start=1):
        for (schedule, model), row in by_cell.items():
            cell = {"partition": cut, "schedule": schedule, "model": model}
            yield cell, [_edited(row, cut, partition=cut, makespan_s=row["makespan_s"] * (1 - 0.01 * number))]


def _ahead(by_cell: Mapping[tuple[str, str], Record]) -> Cells:
    for (schedule, model), row in by_cell.items():
        if schedule != "roundpipe":
            made = _edited(row, "ahead", partition="search", makespan_s=0.9 * row["makespan_s"])
            yield {"schedule": schedule, "model": model}, [made]


def _waiting(row: Record) -> Record:
    late = _edited(row, "causal", makespan_s=1.01 * row["makespan_s"])
    late["config"]["cost"]["fused_ahead"] = False
    return late


def _whole(row: Record) -> Record:
    return _edited(row, "one round", schedule=ONE_ROUND, partition="search", makespan_s=0.95 * row["makespan_s"])


def _steady(dealt: Mapping[str, Record], *, waits: bool = False) -> Cells:
    for model, row in dealt.items():
        for count in (8, 9, 10, 16):
            yield {"model": model, "num_microbatches": count}, [_back_to_back(row, count, waits)]


def _dispatched(dealt: Mapping[str, Record]) -> Cells:
    for model, row in dealt.items():
        for size in (1, 4, 8):
            yield {"model": model, "schedule.round_size": size}, [_dealt(row, size)]


def _of_unit_work(row: Record) -> dict[str, Cells]:
    """Records of the experiments that compare schedules as such; the later its name, the larger a bubble."""
    axes = {"tradeoff": "num_microbatches", "hop_latency": "cost.hop_ms", "uneven_head": "cost.head_share"}
    axes |= dict.fromkeys(thousand_devices.EXPERIMENTS, "num_devices")
    return {name: list(_unit_work_of(row, name, axis)) for name, axis in axes.items()}


def _unit_work_of(row: Record, name: str, axis: str) -> Cells:
    base = composed([f"experiment={name}"]).node
    for (rank, schedule), value in product(enumerate(swept(name, "schedule")), swept(name, axis)):
        config = copy.deepcopy(row["config"])
        fields = {"num_microbatches": base.num_microbatches}
        of_costs = axis.startswith("cost.")
        (config["cost"] if of_costs else fields)[axis.removeprefix("cost.")] = value
        made = _edited(
            row,
            f"{name} {schedule} {value}",
            schedule=schedule,
            config=config,
            cost="constant",
            peak_in_flight=[8 + rank] * 8,
            bubble_makespan=0.0008 * (rank + value),
            bubble_span=0.0004 * (rank + value),
            **fields,
        )
        yield {"schedule": schedule, axis: value}, [made]


def _turning(row: Record) -> dict[str, Cells]:
    """Records of the levels of charging: each moves the order on by one; from memory on DualPipe is out."""
    return {experiment: list(_level(row, place, experiment)) for place, experiment in enumerate(LEVELS.values())}


def _level(row: Record, place: int, experiment: str) -> Cells:
    keys = ("model", "cluster", "schedule")
    for model, cluster, schedule in product(*(swept(experiment, key) for key in keys)):
        names = swept(experiment, "schedule")
        out = schedule == "dualpipe" and place >= list(LEVELS).index("memory")
        fields = {"status": "infeasible"} if out else {}
        time = 1.0 + (names.index(schedule) + place) % len(names)
        name = f"{experiment} {model} {cluster} {schedule}"
        made = _edited(row, name, model=model, cluster=cluster, schedule=schedule, step_time_s=time, **fields)
        yield {"model": model, "cluster": cluster, "schedule": schedule}, [made]


def _failing(row: Record) -> Cells:
    """Records of runs with failures: the later its name and the shorter ranks live, the less a policy keeps."""
    keys = ("mode.policy", "mode.mean_between_s", "seed")
    lives = swept("goodput", keys[1])
    for (rank, policy), life, seed in product(enumerate(swept("goodput", keys[0])), lives, swept("goodput", keys[2])):
        kept = 0.95 - (0.05 * rank + 0.01 * seed) * lives[0] / life
        likely = {"recoverable_probability": {"0": 1.0, "1": 1.0, "2": 14 / 15}} if policy == "gemini" else {}
        fields = {"policy": policy, "goodput": kept, "num_ranks": 16, "num_failures": 3, "seed": seed, **likely}
        made = _edited(row, f"{policy} {life} {seed}", mode="failures", evidence="predicted", **fields)
        made["config"]["mode"] = {"name": "failures", "policy": policy, "mean_between_s": life}
        yield dict(zip(keys, (policy, life, seed), strict=True)), [made]


def _what_if(row: Record) -> dict[str, Cells]:
    """Records of the two what-if experiments: the copies decide on the left, the devices on the right."""
    left, right = [], []
    for x, y, (rank, system) in product(what_if.COPY_RATES, what_if.VOCABULARIES, enumerate(what_if.SYSTEMS)):
        point = _predicted(row, system, f"{x} {y}", 1000.0 * (4 - rank if x > 1e9 else 1 + rank))
        point["config"]["cluster"]["copy_bytes_per_s"], point["config"]["model"]["vocab"] = x, y
        left.append(({"mode.system": system, "cluster.copy_bytes_per_s": x, "model.vocab": y}, [point]))
    for x, y, (rank, system) in product(what_if.DEVICES, what_if.MICROBATCHES, enumerate(what_if.SYSTEMS)):
        point = _predicted(row, system, f"{x} devices {y}", 1000.0 * (4 - rank), num_devices=x)
        point["config"]["num_devices"] = x
        point["config"]["mode"] = {"name": "predict", "sequences": 4, "microbatches": y}
        right.append(({"mode.system": system, "num_devices": x, "mode.microbatches": y}, [point]))
    return {"what_if": left, "what_if_devices": right}


def _predicted(row: Record, system: str, why: str, rate: float, **fields: object) -> Record:
    return _edited(
        row,
        f"what if {system} {why}",
        mode="predict",
        cost="analytic",
        evidence="predicted",
        system=system,
        tokens_per_s=rate,
        tokens_per_s_low=0.9 * rate,
        tokens_per_s_high=1.1 * rate,
        memory_margin=0.5,
        **fields,
    )


def _trained(row: Record) -> dict[str, Cells]:
    """Records of the two experiments of convergence: losses that fall, some faster."""
    methods = list(enumerate(convergence.METHODS))
    one = convergence.ONE_BY_ONE
    return {
        convergence.EXPERIMENTS[0]: list(_curves(row, [each for each in methods if each[1] != one])),
        convergence.EXPERIMENTS[1]: list(_curves(row, [each for each in methods if each[1] == one])),
    }


def _curves(row: Record, methods: list[tuple[int, str]]) -> Cells:
    for (number, method), seed in product(methods, convergence.SEEDS):
        each, points = (1, 96) if method == convergence.ONE_BY_ONE else (4, 24)
        schedule = "1f1b" if method == convergence.ONE_BY_ONE else method
        made = _edited(
            row,
            f"{method} {seed}",
            schedule=schedule,
            mode="train",
            backend="virtual",
            num_devices=4,
            num_microbatches=each,
            seed=seed,
            tokens_per_step=1024,
            num_updates=points,
            staleness_steps=1,
            weight_versions=2,
            loss_curve=[5.5 - (2.5 + 0.1 * number + 0.01 * seed) * point / points for point in range(points)],
            tokens_per_s=1024.0 * points,
            loss_curve_s=[(1 + 0.1 * number) * (point + 1) / points for point in range(points)],
        )
        yield {"schedule": schedule, "seed": seed}, [made]


def _back_to_back(row: Record, count: int, waits: bool) -> Record:
    bubble = (0.5 if waits else 0.4) / count
    step_time_s = sum(row["busy_s"]) / row["num_devices"] * count / row["num_microbatches"] / (1 - bubble)
    tokens = row["tokens_per_step"] * count // row["num_microbatches"]
    steady = _edited(
        row,
        f"steady {count}{' waits' if waits else ''}",
        num_steps=60,
        num_microbatches=count,
        bubble_steady=bubble,
        bubble_between_ends=1.01 * bubble,  # another measure, and nearly the same number
        step_time_s=step_time_s,
        tokens_per_step=tokens,
        tokens_per_s=tokens / step_time_s,
    )
    steady["config"]["schedule"] |= {"round_size": count, "asynchronous": True}
    steady["config"]["cost"]["fused_ahead"] = not waits
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


def _duels(row: Record) -> Cells:
    for model in DUEL_MODELS:
        made = [_contender(row, model, contender, 2 - 0.1 * number) for number, contender in enumerate(NAMES)]
        yield {"model": model}, made


def _torch_duel(row: Record) -> list[Record]:
    found = []
    for fields in torch_duel_rows.rows().values():
        own = {key: value for key, value in fields.items() if key not in ("run_id", "config")}
        made = _edited(row, fields["run_id"], **own)
        made["config"]["mode"] = fields["config"]["mode"]
        found.append(made)
    return found


def _verified_runs(row: Record) -> Cells:
    for backend, dtype in product(("virtual", "cpu"), ("float64", "float32", "bfloat16")):
        yield {"backend": backend, "dtype": dtype}, [_verified(row, backend, dtype)]


def _compared(by_cell: Mapping[tuple[str, str], Record]) -> dict[str, Cells]:
    """Records of the experiments of figure 10 and `experiment=baselines_cpu`."""
    cells = []
    for (number, name), model in product(enumerate(swept("figure10", "schedule")), MODELS):
        late = name.endswith(("_async", "_delayed")) or name == "pipedream"
        fields = {"cluster": "8x_rtx4090", "num_steps": 4, "tokens_per_s": 1000.0 + number, **_chosen(name)}
        row = _system(by_cell["1f1b", model], name, f"on eight {name}", staleness_steps=int(late), **fields)
        cells.append(({"schedule": name, "model": model}, [row]))
    made: dict[str, Cells] = {"figure10": cells, "figure10_published": list(_runs_of_scripts(by_cell))}
    measured = []
    for number, name in enumerate(("1f1b", "pipedream", "zero_3")):
        row = by_cell["1f1b", MODELS[0]]
        cpu = _system(row, name, f"on two {name}", backend="cpu", model="tiny_gpt", num_devices=2, num_steps=3)
        cpu |= {"mode": "train", "loss": 5.0, "staleness_steps": number}
        measured.append(({"schedule": name}, [cpu | {"grad_max_abs_diff": 0.0 if number < 2 else 1e-9}]))
    return made | {"baselines_cpu": measured}


def _chosen(name: str) -> dict[str, object]:
    """What a search of all options leaves; DAPPLE has the order of 1F1B."""
    return {
        "partition": "contest",
        "microbatch_sequences": 2,
        "chunks_per_device": None if name.startswith("roundpipe") else 1,
        "recompute": "fitting",
        "kept_layers": [0, 0, 0, 0, 0, 0, 3, 4],
        "prefetch": 1,
        "schedule_options": {"round_size": 8} if name.startswith("roundpipe") else {},
        "step_terms_s": {"computation": 1.0, "recomputation": 0.1, "bubble": 0.2},
        "order_sha256": "1f1b" if name == "dapple" else name,
        "budget_timelines": 160,
        "spent_timelines": 100,
        "num_settings_tried": 12,
        "num_restarts": 10,
        "restart_gain": 0.001,
        "pace_gap": 0.02,
    }


def _runs_of_scripts(by_cell: Mapping[tuple[str, str], Record]) -> Cells:
    """Published runs: RoundPipe 10 % off its bar, the others twice as fast where they fit."""
    for system, model in product(swept("figure10_published", "mode.system"), MODELS):
        name = PUBLISHED_MODELS[model]
        bar = look_up("throughput", "tokens_per_s", system=system, model=name, platform="8x-rtx4090-24gb").value
        pace = None if bar is None else bar * (1.1 if system == "roundpipe" else 2.0)
        row = _edited(
            by_cell["1f1b", model],
            f"script of {system}",
            mode="predict",
            evidence="predicted",
            system=system,
            status="infeasible" if pace is None else "ok",
            reason="1.50 times the memory that there is" if pace is None else None,
            tokens_per_s=pace,
            step_terms_s={"computation": 1.0, "recomputation": 0.3, "bubble": 0.3},
            lacks=["a term"],
            microbatch_sequences=4,
            recompute="all",
            predicted_status="ok",
            predicted_tokens_per_s=pace and (pace if system == "mobius" else 1.5 * pace),
            predicted_terms_s={"computation": 1.0, "bubble": 0.1},
        )
        yield {"mode.system": system, "model": model}, [row]


def _system(row: Record, name: str, why: str, *, num_steps: int, **fields: object) -> Record:
    moved = {"h2d_bytes": [3 * 10**9] * 8, "net_bytes": [6 * 10**9] * 8, "d2h_bytes": [0] * 8}
    found = _edited(
        row,
        why,
        schedule=name,
        generator="roundpipe" if name.startswith("roundpipe") else name,
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
    """Two starts of eight runs each: too few for a verdict, which is what most machines will say as well."""
    place = list(NAMES).index(contender)
    at = [30.0 * turn + place for turn in range(8)]
    runs = {"at_s": at, "wall_s": [1.1 * seconds] * 8, "replay_s": [seconds] * 8, "cpu_s": [1.8 * seconds] * 8,
            "elapsed_s": [1.1 * seconds] * 8, "others_s": [0.0] * 8}  # fmt: skip
    made = _edited(
        row,
        f"duel {model} {contender}",
        mode="duel",
        backend=None,
        model=model,
        contender=contender,
        evidence="measured",
        round_size=8 if contender.startswith("roundpipe") else None,
        recompute="all",
        makespan_s=1.1 * seconds,
        replay_makespan_s=seconds,
        simulated_makespan_s=0.98 * seconds,
        emulated_makespan_s=0.99 * seconds,
        cpu_s=1.8 * seconds,
        foreign_cpu_share=0.0,
        starts=[{"num_cores": 2, "num_turns": 8, "spent_s": 240.0}] * 2,
        runs=[runs, runs],
        calibrated_makespans_s=[0.9 * seconds, 1.1 * seconds, 0.9 * seconds],
        calibration_foreign_cores=[0.5, 0.25, None],
    )
    made["config"]["mode"] = {"name": "duel", "half_width": 0.02, "num_starts": 2}
    return made


def _verified(row: Record, backend: str, dtype: str) -> Record:
    run = _edited(
        row,
        f"verified {backend} {dtype}",
        mode="train",
        backend=backend,
        model="tiny_gpt",
        num_devices=4,
        grad_max_abs_diff=0.0 if dtype != "bfloat16" else 1e-3,
    )
    run["config"] |= {"verify": True, "num_steps": 2, "dtype": dtype}
    return run


def _edited(row: Record, why: str, **fields: object) -> Record:
    other = copy.deepcopy(row) | fields
    other.pop("surroundings", None)  # with them a record's name is held to what it was made of
    return other | {"run_id": record.run_id({"copy of": row["run_id"], "why": why}), "files": [], "made_up": True}
