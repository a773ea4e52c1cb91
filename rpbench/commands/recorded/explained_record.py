"""A record as a side: its number, and its causes by timing what it asked for once more.

simulated, predicted, emulated   the schedule, timed again with collectives, the host's updates and transfers free
measured                         the replay of its own durations; what other load took is the rest
mode=predict                     the system, as `rpbench.explain.of_case` has it
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from rpbench.advice.causes import causes_at
from rpbench.config.choices import ConfigError, Predict
from rpbench.config.configuration import is_of_hydra
from rpbench.config.request import Request, load
from rpbench.cost.table import CostTable
from rpbench.explain.number import Number
from rpbench.explain.of_case import side_of_case, work_of
from rpbench.explain.side import COMPUTATION, Side, Work
from rpbench.finite import is_finite
from rpbench.records.clock import unit
from rpbench.records.record import Record
from rpbench.run.assemble import Assembled
from rpbench.run.modes.predict import basis_of, case_of
from rpbench.run.scheduled import assembled_of
from rpbench.sim.metrics import measure
from rpbench.sim.shared_links.links import simulate_charged
from rpbench.sim.steady import step_time
from rpbench.workload.architecture import Architecture

SHOWN = ("schedule", "model", "cluster", "cost", "mode", "backend", "partition_layers", "offload", "staleness_steps")
MODES = ("simulate", "train", "predict")


def side_of_record(row: Record) -> Side:
    """The side of a record.

    Raises:
        ConfigError: for a record without a time, or of a mode that takes no step.
    """
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
    """The numbers of a record that its explanation is made of."""
    if row["mode"] == "predict":
        return ("tokens_per_s",)
    units = "tokens_per_step" if row.get("tokens_per_step") is not None else "num_microbatches"
    measured = ("makespan_s", *(key for key in ("replay_makespan_s", "replay_busy_s") if row.get(key)), "busy_s")
    return ("step_time_s", "num_devices", units, *(measured if row["evidence"] == "measured" else ()))


def _are_above_zero(value: object) -> bool:
    """Whether a number is, or every one of a list of them."""
    numbers = value if isinstance(value, list) else [value]
    return bool(numbers) and all(is_finite(each) and each > 0 for each in numbers)


@lru_cache(maxsize=8)
def _request(*overrides: str) -> Request:
    """What a record asked for; its words are a stranger's, and reach neither Hydra itself nor the environment.

    Raises:
        ConfigError: for one that would.
    """
    for item in overrides:
        if is_of_hydra(item) or "${" in item:
            raise ConfigError(f"{item!r:.80}: a record's choices are plain values; this one is none that a run writes")
    return load(overrides)


def _notes(row: Record, request: Request) -> tuple[str, ...]:
    found = [] if _plain(request.subject) == row["config"] else ["its choices no longer say what they did when it ran"]
    if row.get("staleness_steps") and _prompt(request) is None:
        late = row["staleness_steps"]
        found.append(
            f"its updates are {late} step{'' if late == 1 else 's'} late: what that saves stands in the bubble"
        )
    return tuple(found)


def side_of_number(row: Record, number: Number, settings: Mapping[str, str]) -> Side:
    """A typed number of a run that is like a record but for some settings.

    Raises:
        ConfigError: for a setting that is not known, or a record that has no configuration.
        ValueError: for a rate whose FLOPs or peak are not known.
    """
    if "overrides" not in row:
        raise ConfigError(f"run {row['run_id'][:8]} says no choices that typed settings could stand beside")
    words = [f"{key}={value}" for key, value in settings.items()]
    request = _request(*row["overrides"], *words)
    label = " ".join([f"{number.unit}={number.value:g}", *words])
    work, own = _work(request), _architecture(request)
    rate = number.rate(own, request.model.seq_len if request.model else 0, work)
    if isinstance(request.mode, Predict):
        case = case_of(request)
        seconds = number.device_seconds(case.num_devices, case.tokens_per_step, rate)
        return replace(_predicted(request, case.num_devices / seconds, label, "given"), rate=rate)
    if not request.tokens_per_microbatch:
        raise ConfigError(f"{label}: model={request.model_name} has no tokens; take a run of a model with a shape")
    tokens = request.tokens_per_step
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
    """Seconds of a simulated step by cause, as a mean over devices; they add up to the step.

    Raises:
        ValueError: for whatever in the request cannot be.
    """
    assembled = assembled_of(request)
    prompt = _prompt(request)
    if prompt is None:
        return _of_schedule(assembled)
    found = _of_schedule(assembled_of(prompt))
    return found | {"late updates": sum(_of_schedule(assembled).values()) - sum(found.values())}


def _prompt(request: Request) -> Request | None:
    """The request with updates in time, of a schedule whose option makes them late; None for any other."""
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
    uneven = max(0.0, min(found["bubble"], _unevenness(assembled)))
    return {**found, "partition": uneven, "bubble": found["bubble"] - uneven}


def _unevenness(assembled: Assembled) -> float:
    """Seconds of a step that the busiest device computes longer than the mean."""
    timeline = simulate_charged(assembled.graph, assembled.costs)
    after = assembled.switch_after_last_forward
    busy = measure(assembled.graph, timeline, assembled.costs, switch_after_last_forward=after)["busy_s"]
    return float(max(busy) - sum(busy) / len(busy)) / assembled.schedule.shape.num_steps


def _replayed(row: Record, simulated: Mapping[str, float]) -> dict[str, float]:
    """Seconds of a measured step by cause: the same order with the processor time of its own actions.

    Args:
        simulated: seconds by cause at given costs, which say what part of the work is recomputation.
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
    if request.cost.name == "analytic":
        try:
            return work_of(model, tokens, basis_of(request.cluster, request.cost), "roundpipe")
        except ValueError:  # a calibrated machine has figures of its own
            pass
    flops = 3 * model.forward_flops(model.seq_len, "causal") / model.seq_len
    return Work(flops, request.cluster.wide_matmul_flops_per_s or request.cluster.matmul_flops_per_s)


def _architecture(request: Request) -> Architecture | None:
    return None if request.model is None or request.model.lora_rank else request.model


def _plain(subject: Mapping[str, Any]) -> Any:
    return json.loads(json.dumps(subject, default=str))
