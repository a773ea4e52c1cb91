"""`explain`: why two numbers differ - two records, a record or a row and a typed number, or two rows of tables.

Causes of a record's time come from

simulated, predicted, emulated   its schedule, timed again with free collectives, host updates and transfers
under a mesh                     the terms of its step, timed again
measured                         a replay of its own durations; the load of other programs is the rest
mode=predict                     the model of its system (`rpbench.explain.predicted`)
"""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import exp
from pathlib import Path
from typing import Any, TextIO, get_args

from rpbench.advice.causes import causes_at
from rpbench.config.choices import ConfigError, Predict
from rpbench.config.configuration import is_of_hydra
from rpbench.config.errors import config_errors
from rpbench.config.loading import load
from rpbench.config.request import Request
from rpbench.cost.table import CostTable
from rpbench.explain.predicted import dtype_gain, side_of_case, work_of
from rpbench.explain.side import COMPUTATION, DECLARED, UNITS, Number, Side, Work, number_of
from rpbench.explain.split import Metric, explain
from rpbench.mesh.software import usual_software
from rpbench.records.describe import unit
from rpbench.records.record import Record, find, read_all
from rpbench.registry import check_known, unknown_name
from rpbench.run.assemble import Assembled
from rpbench.run.mesh_run import job_of, planned, simulated, tokens_of
from rpbench.run.modes.predict import basis_of, case_of
from rpbench.run.scheduled import assembled_of
from rpbench.sim.metrics import measure, step_time
from rpbench.sim.shared_links import simulate_charged
from rpbench.untrusted import is_finite

SHOWN = ("schedule", "model", "cluster", "cost", "mode", "backend", "partition_layers", "offload", "staleness_steps")
WORK = ("work", "kernels", "recompute", "collectives", "host")  # terms of the busiest rank, of a step under a mesh
MODES = ("simulate", "train", "predict")


def side_of_record(row: Record) -> Side:
    """The side of a record; ConfigError for a record without a time, or of a mode that takes no step."""
    name = f"run {row['run_id'][:8]}"
    if row["status"] != "ok":
        raise ConfigError(
            f"{name} has no time to explain: it is {row['status']}, {row.get('reason')}; name another run"
        )
    if row["mode"] not in MODES or "overrides" not in row:
        raise ConfigError(
            f"{name} is of mode={row['mode']}, evidence {row.get('evidence')}: it says no choices whose step could be "
            f"timed again; name a run of mode {', '.join(MODES)}, or type its number: tokens_per_s=..."
        )
    if missing := [key for key in _needed(row) if not _are_above_zero(row.get(key))]:
        raise ConfigError(f"{name} says no {', '.join(missing)} above 0: it was not written by rpbench; run it again")
    request = _request(*row["overrides"])
    notes = _notes(row, request)
    if isinstance(request.mode, Predict):
        return replace(_predicted(request, row["tokens_per_s"], name, row["evidence"]), notes=notes)
    tokens = row.get("tokens_per_step")
    units = tokens or row["num_microbatches"]
    if row["evidence"] == "measured":
        causes, model = _replayed(row, step_causes(request)), "measured"
    else:
        causes, model = step_causes(request), _model(request)
    each = row["num_devices"] / units
    return Side(
        name,
        each * row["step_time_s"],
        row["evidence"],
        {cause: each * seconds for cause, seconds in causes.items()},
        model,
        unit="token" if tokens else "microbatch",
        clock=unit(row),
        work=_work(request),
        settings={key: row.get(key) for key in (*SHOWN, "num_devices", "num_microbatches", "num_steps")},
        notes=notes,
    )


def _needed(row: Record) -> tuple[str, ...]:
    if row["mode"] == "predict":
        return ("tokens_per_s",)
    units = "tokens_per_step" if row.get("tokens_per_step") is not None else "num_microbatches"
    measured = ("makespan_s", *(key for key in ("replay_makespan_s", "replay_busy_s") if row.get(key)), "busy_s")
    return ("step_time_s", "num_devices", units, *(measured if row["evidence"] == "measured" else ()))


def _are_above_zero(value: object) -> bool:
    """Whether a number, or every number of a list, is above zero."""
    numbers = value if isinstance(value, list) else [value]
    return bool(numbers) and all(is_finite(each) and each > 0 for each in numbers)


@lru_cache(maxsize=8)
def _request(*overrides: str) -> Request:
    """The request of a record. Its words are untrusted: they must reach neither Hydra nor the environment."""
    for item in overrides:
        if is_of_hydra(item) or "${" in item:
            raise ConfigError(f"{item!r:.80}: a record's choices are plain values; this one is none that a run writes")
    return load(overrides)


def _notes(row: Record, request: Request) -> tuple[str, ...]:
    plain = json.loads(json.dumps(request.subject, default=str))
    found = [] if plain == row["config"] else ["its choices no longer say what they did when it ran"]
    if row.get("staleness_steps") and _prompt(request) is None:
        late = row["staleness_steps"]
        found.append(
            f"its updates are {late} step{'' if late == 1 else 's'} late: what that saves stands in the bubble"
        )
    return tuple(found)


def side_of_number(row: Record, number: Number, settings: Mapping[str, str]) -> Side:
    """The side of a typed number of a run like a record, except for some settings.

    ConfigError for an unknown setting or a record without a configuration; ValueError for a rate whose FLOPs or peak
    are unknown.
    """
    if "overrides" not in row:
        raise ConfigError(f"run {row['run_id'][:8]} says no choices that typed settings could stand beside")
    words = [f"{key}={value}" for key, value in settings.items()]
    request = _request(*row["overrides"], *words)
    label = " ".join([f"{number.unit}={number.value:g}", *words])
    work, own = _work(request), None if request.model is None or request.model.lora_rank else request.model
    rate = number.rate(own, request.model.seq_len if request.model else 0, work)
    if isinstance(request.mode, Predict):
        case = case_of(request)
        seconds = number.device_seconds(case.num_devices, case.tokens_per_step, rate)
        return replace(_predicted(request, case.num_devices / seconds, label, "given"), rate=rate)
    if not request.tokens_per_microbatch:
        raise ConfigError(f"{label}: model={request.model_name} has no tokens; take a run of a model with a shape")
    tokens = request.tokens_per_step
    if request.meshed is not None:  # on all devices
        job, _, order, _ = planned(request)
        tokens = tokens_of(job, order)
    each = request.num_devices / tokens
    return Side(
        label,
        number.device_seconds(request.num_devices, tokens, rate),
        "given",
        {cause: each * seconds for cause, seconds in step_causes(request).items()},
        _model(request),
        clock="slots" if request.cost.name == "unit" else "s",
        work=work,
        rate=rate,
        settings={key: request.choices.get(key) for key in SHOWN if key in request.choices}
        | {"num_devices": request.num_devices, "num_microbatches": request.asked_microbatches},
        notes=(f"what is not typed is as in run {row['run_id'][:8]}",),
    )


def _model(request: Request) -> str:
    return "predicted" if request.cost.name == "analytic" else "simulated"


def _predicted(request: Request, tokens_per_s: float, label: str, evidence: str) -> Side:
    return side_of_case(case_of(request), tokens_per_s, label, evidence=evidence)


# --- seconds of a step -----------------------------------------------------------------------------------------


def step_causes(request: Request) -> dict[str, float]:
    """Seconds of a simulated step by cause, as a mean over devices; they add up to the step."""
    whole, prompt = _causes(request), _prompt(request)
    if prompt is None:
        return whole
    found = _causes(prompt)
    return found | {"late updates": sum(whole.values()) - sum(found.values())}


def _causes(request: Request) -> dict[str, float]:
    """Seconds of a simulated step by cause, late updates aside."""
    return _of_schedule(assembled_of(request)) if request.meshed is None else _under_mesh(request)


def _under_mesh(request: Request) -> dict[str, float]:
    """The terms of a step under a mesh by cause; those of the busiest rank's work are cut to the mean of ranks."""
    *_, step = simulated(request)
    switch = request.entry.switch_after_last_forward
    busy = measure(step.sharded, step.timeline, step.costs, switch_after_last_forward=switch)["busy_s"]
    mean = sum(busy) / len(busy) / max(busy)  # over the busiest
    found = dict.fromkeys(DECLARED["cause_of_mesh_term"].values(), 0.0) | {"partition": 0.0}
    for name, seconds in step.terms.items():
        own = seconds * mean if name in WORK else seconds
        found[DECLARED["cause_of_mesh_term"][name]] += own
        found["partition"] += seconds - own
    return found


def _prompt(request: Request) -> Request | None:
    """The request with timely updates, if an option of its schedule makes them late; None otherwise."""
    late, options = request.entry.late or {}, request.schedule.options
    if not late or request.schedule.file is not None or any(options.get(key) != value for key, value in late.items()):
        return None
    in_time = {key: not value if isinstance(value, bool) else request.entry.options[key] for key, value in late.items()}
    return replace(request, schedule=replace(request.schedule, options={**options, **in_time}))


def _of_schedule(assembled: Assembled) -> dict[str, float]:
    graph, costs = assembled.graph, assembled.costs

    def paced(priced: CostTable) -> float:
        timeline = simulate_charged(graph, priced)
        return float(step_time(graph, timeline)) / timeline.units_per_second

    found = causes_at(graph, costs, paced)
    busy = assembled.metrics(simulate_charged(graph, costs), costs, graph)["busy_s"]
    longer = float(max(busy) - sum(busy) / len(busy)) / assembled.schedule.shape.num_steps  # the busiest than the mean
    uneven = max(0.0, min(found["bubble"], longer))
    return {**found, "partition": uneven, "bubble": found["bubble"] - uneven}


def _replayed(row: Record, simulated: Mapping[str, float]) -> dict[str, float]:
    """Seconds of a measured step by cause: a replay of its order with the measured times of its actions.

    The share of recomputation in the work is that of the seconds by cause in `simulated`.
    """
    makespan = row.get("replay_makespan_s") or row["makespan_s"]
    busy = row.get("replay_busy_s") or row["busy_s"]
    steps = row["makespan_s"] / row["step_time_s"]
    mean = sum(busy) / len(busy)
    again = simulated["recomputation"] / (simulated[COMPUTATION] + simulated["recomputation"])
    parts = {
        COMPUTATION: mean * (1 - again),
        "recomputation": mean * again,
        "partition": max(busy) - mean,
        "bubble": makespan - max(busy),
    }
    return {name: seconds / steps for name, seconds in parts.items()}


# --- what is computed ------------------------------------------------------------------------------------------


def _work(request: Request) -> Work | None:
    model, tokens = request.model, request.tokens_per_microbatch
    if model is None or not tokens:
        return None
    flops = 3 * model.forward_flops(model.seq_len, "causal") / model.seq_len
    if request.meshed is not None:
        job = job_of(request)
        return Work(flops, job.machine.device.flops_16, dtype_gain(job) if request.meshed.counts_layers else 1)
    known = request.software or usual_software(request.cluster.measured)
    if request.cost.name == "analytic" and known.kernels == "eager":  # others sum in fp32
        try:
            return work_of(model, tokens, basis_of(request.cluster, request.cost), "roundpipe")
        except ValueError:  # a calibrated machine has figures of its own
            pass
    return Work(flops, request.cluster.wide_matmul_flops_per_s or request.cluster.matmul_flops_per_s)


USAGE = (
    "explain A B [metric=pace|tflops|mfu] [results_dir=DIR]; A, B: a run id, or table=NAME:ROW; instead of B a number "
    "with its unit and what is known of it: tokens_per_s=N|tokens_per_s_per_device=N|step_time_s=S|"
    "tflops_per_device=N|mfu=SHARE [flops=causal|6n|palm|megatron|megatron_recompute] [peak_flops_per_s=N] "
    "key=value ..."
)
TABLE = "table="
OWN = ("results_dir", "metric")
WIDTH = 28  # of a bar, for the largest part


@dataclass(frozen=True)
class Asked:
    """The words of the command line: names of runs and tables, the verb's own keys, and those of a typed number."""

    names: tuple[str, ...]
    own: Mapping[str, str]
    typed: Mapping[str, str]

    @property
    def results(self) -> Path:
        return Path(self.own.get("results_dir", "results"))


SideOfRow = Callable[[str], Side]
SideOfNumber = Callable[[str, Number, Mapping[str, str]], Side]


def explain_numbers(
    arguments: Sequence[str], people: TextIO, side_of_row: SideOfRow, side_of_row_number: SideOfNumber
) -> dict[str, Any]:
    """The explanation as JSON-ready data; its table goes to `people`.

    `side_of_row` reads the row `NAME:ROW` of a published table, `side_of_row_number` a typed number of a run like that
    of such a row, except for some settings.
    """
    asked = _asked(arguments)
    metric = _metric(asked)
    with config_errors(""):
        answer = explain(*_sides(asked, side_of_row, side_of_row_number), metric).plain()
    print_explanation(answer, people)
    return answer


def _asked(arguments: Sequence[str]) -> Asked:
    names, own, typed = [], {}, {}
    for item in arguments:
        key, equals, value = item.partition("=")
        if item.startswith(TABLE) or not equals:
            names.append(item)
        elif not value:
            raise ConfigError(f"cannot read {item!r}: write key=value, as in {USAGE}")
        elif key in own or key in typed:
            raise ConfigError(f"{item}: {key}= is given twice; leave one out")
        elif key in OWN:
            own[key] = value
        else:
            typed[key] = value
    if len(names) == 2 and typed:
        first = next(iter(typed))
        raise ConfigError(unknown_name("key", first, [*OWN]) + f"; a typed number takes the place of {names[1]}")
    if len(names) == 1 and not typed:
        raise ConfigError(f"explain {names[0]}: a second number is missing; {USAGE}")
    if not 1 <= len(names) <= 2:
        raise ConfigError(f"explain takes two numbers, not {len(names)}: {USAGE}")
    return Asked(tuple(names), own, typed)


def _metric(asked: Asked) -> Metric:
    usual = "mfu" if "mfu" in asked.typed else "tflops" if "tflops_per_device" in asked.typed else "pace"
    name = asked.own.get("metric", usual)
    check_known("metric", name, get_args(Metric))
    return name  # type: ignore[return-value]  # one of them


def _sides(asked: Asked, side_of_row: SideOfRow, side_of_row_number: SideOfNumber) -> tuple[Side, Side]:
    first, *others = [
        side_of_row(name.removeprefix(TABLE)) if name.startswith(TABLE) else side_of_record(_run(asked, name))
        for name in asked.names
    ]
    if others:
        return first, others[0]
    number, settings = number_of(asked.typed)
    name = asked.names[0]
    if name.startswith(TABLE):
        return first, side_of_row_number(name.removeprefix(TABLE), number, settings)
    return first, side_of_number(_run(asked, name), number, settings)


def _run(asked: Asked, name: str) -> Record:
    """The record of a name; ConfigError for a number without a unit."""
    try:
        float(name.replace(",", ""))
    except ValueError:
        return find(asked.results, name)
    if any(read_all(asked.results, name)):
        return find(asked.results, name)
    units = ", ".join(f"{unit}={name}" for unit in UNITS)
    raise ConfigError(f"{name}: no run of {asked.results} begins with it, and a number needs its unit: {units}")


# --- the table -----------------------------------------------------------------------------------------------


def print_explanation(answer: Mapping[str, Any], people: TextIO) -> None:
    width = shutil.get_terminal_size((120, 24)).columns
    a, b, rest = answer["a"], answer["b"], answer["unexplained"]
    lines = [f"B over A, {answer['metric_is']}: {_factor(answer['ratio'])}"]
    for name, side in (("A", a), ("B", b)):
        of_model = side["device_seconds"] / side["predicted_device_seconds"]
        lines.append(
            f"{name}  {side['label']}: {side['device_seconds']:.4g} device-{side['clock']} a {side['per']} "
            f"({side['evidence']}), {_factor(of_model)} of what the model says"
        )
    lines.append(f"{'factor':>8} {'log':>8} {'share':>7}  cause")
    largest = max([abs(row["log"]) for row in answer["causes"]] + [abs(rest["log"]), 1e-12])
    rows = [*answer["causes"], {**rest, "cause": "unexplained", "evidence": "the rest"}]
    lines += [_line(row, largest) for row in rows]
    lines.append(f"{_factor(exp(answer['log_ratio'])):>8} {answer['log_ratio']:>+8.3f} {'100 %':>7}  together")
    lines += [f"{name}: {note}" for name, side in (("A", a), ("B", b)) for note in side["notes"]]
    for line in lines:
        print(line if len(line) <= width else line[: max(20, width - 1)] + "…", file=people)


def _factor(value: float) -> str:
    """A factor with three decimals, or with three digits if it is very small or large."""
    return f"{value:.3f}" if 0.01 <= value < 10_000 else f"{value:.2e}"


def _line(row: Mapping[str, Any], largest: float) -> str:
    share = row["share_of_difference"]
    text = "-" if share is None else f"{100 * share:.0f} %"
    bar = ("+" if row["log"] > 0 else "-") * round(WIDTH * abs(row["log"]) / largest)
    factor = f"{_factor(row['factor']):>8} {row['log']:>+8.3f} {text:>7}"
    return f"{factor}  {row['cause']:<16} {row['evidence']:<22} {bar}".rstrip()
