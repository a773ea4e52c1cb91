"""Measuring: our threads, torch's runtime with our table, and torch's own schedule, in turn on the same stages.

A round runs every contender once, in an order that changes from round to round, so that what slows the machine slows
all of them; ratios are made within a round. The verdict over rounds is the caller's (`rpbench.harness.duel`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import torch

from rpbench.cost.table import LayerTimes
from rpbench.engine.backends.cpu import CpuBackend
from rpbench.engine.executor import execute
from rpbench.engine.training import Settings, Training
from rpbench.torch_runtime.outcome import Outcome
from rpbench.torch_runtime.own_schedules import ONE_STAGE, SAME_NAME
from rpbench.torch_runtime.ranks import Ranks
from rpbench.torch_runtime.replay import predicted_makespan, profiled_costs, replay_makespan, time_parts
from rpbench.torch_runtime.request import TorchRequest, check_request

TARGET_TABLE_OVER_OWN = 1.02
TARGET_REPLAY = 0.9


@dataclass
class Measured:
    """A contender's rounds.

    Args:
        name: "threads", "table" or "own".
        walls_s: per round, the median step.
    """

    name: str
    walls_s: list[float] = field(default_factory=list)


@dataclass
class TorchDuel:
    """What the rounds gave; every list has an entry for each round.

    Args:
        contenders: those there were.
        replays: a step's replay over its makespan, medians.
        overheads_s: torch's and the recording's cost of a lowered action, waiting apart, medians.
        predictions: predicted over measured makespan; the costs are those of the round before.
        parts: where the table's rank-seconds went in the last step of the round.
    """

    contenders: dict[str, Measured]
    replays: list[float] = field(default_factory=list)
    overheads_s: list[float] = field(default_factory=list)
    predictions: list[float] = field(default_factory=list)
    parts: list[dict[str, float]] = field(default_factory=list)

    def ratios(self, one: str, other: str) -> list[float]:
        """Wall of one contender over that of another, round by round."""
        pairs = zip(self.contenders[one].walls_s, self.contenders[other].walls_s, strict=True)
        return [mine / theirs for mine, theirs in pairs]

    def fields(self) -> dict[str, Any]:
        """What a record has of it; medians and every round's value."""
        found: dict[str, Any] = {f"{name}_walls_s": each.walls_s for name, each in self.contenders.items()}
        for other in self.contenders.keys() - {"table"}:
            found[f"table_over_{other}"] = median(self.ratios("table", other))
            found[f"round_table_over_{other}"] = self.ratios("table", other)
        return found | {
            "replay_over_measured": median(self.replays),
            "round_replay_over_measured": self.replays,
            "overhead_per_action_s": median(self.overheads_s),
            "predicted_over_measured": median(self.predictions) if self.predictions else None,
            "round_predicted_over_measured": self.predictions,
            "time_parts_s": self.parts[-1],
        }


def contenders_of(request: TorchRequest) -> dict[str, TorchRequest]:
    """The runs on ranks: the table, and torch's schedule of the same name where it has one that takes the stages."""
    found = {"table": request}
    own = SAME_NAME.get(request.lowered.table.name)
    stages = request.lowered.table.shape.num_stages
    if own is not None and not (own in ONE_STAGE and stages != request.num_pipeline_ranks):
        found["own"] = replace(request, order_of=own)
    return found


def measure_rounds(request: TorchRequest, num_rounds: int, *, threads: bool = True) -> TorchDuel:
    """Run every contender once a round.

    Args:
        request: with as many steps as a contender runs in a round, two at least, and warm-up steps.
        threads: run our engine's threads as well, without recomputation as torch does.

    Raises:
        ValueError: if the request cannot be, or has too few steps.
    """
    check_request(request)
    if request.num_steps < 2 or num_rounds < 2:
        raise ValueError(f"num_steps={request.num_steps}, rounds={num_rounds}: at least 2 of each, to take medians of")
    runs: dict[str, Callable[[], Outcome | float]] = {}
    with Ranks(request.num_ranks) as ranks:
        for name, own in contenders_of(request).items():
            runs[name] = lambda own=own: ranks.run(own)  # type: ignore[misc]  # one for each
        if threads:
            runs["threads"] = lambda: threads_wall_s(request)
        duel = TorchDuel({name: Measured(name) for name in runs})
        before: Outcome | None = None
        for number in range(num_rounds):
            before = _round(duel, _rotated(list(runs), number), runs, before)
    return duel


def _rotated(names: Sequence[str], number: int) -> list[str]:
    cut = number % len(names)
    return [*names[cut:], *names[:cut]]


def _round(
    duel: TorchDuel, names: Sequence[str], runs: dict[str, Callable[[], Outcome | float]], before: Outcome | None
) -> Outcome | None:
    table = before
    for name in names:
        found = runs[name]()
        duel.contenders[name].walls_s.append(found if isinstance(found, float) else found.median_wall_s())
        if name == "table" and isinstance(found, Outcome):
            _note(duel, found, before)
            table = found
    return table


def _note(duel: TorchDuel, found: Outcome, before: Outcome | None) -> None:
    """What a round of the table says beside its wall."""
    steps = range(found.num_steps)
    timelines = [found.timeline(step) for step in steps]
    measured = median(timeline.makespan for timeline in timelines)
    duel.replays.append(median(replay_makespan(timeline) / timeline.makespan for timeline in timelines))
    parts = [time_parts(found, step) for step in steps]
    duel.overheads_s.append(median(part.overhead_per_action_s for part in parts))
    duel.parts.append(vars(parts[-1]))
    if before is not None:
        costs = profiled_costs(before.timeline(), before.hop_s)
        duel.predictions.append(predicted_makespan(found.request.lowered.table, costs) / measured)


def threads_wall_s(request: TorchRequest) -> float:
    """Median seconds of the same steps on our engine's threads, one a rank, without optimizer steps."""
    table, workload = request.lowered.table, request.workload()
    assert table.partition is not None
    layers = [1.0] * table.partition.num_layers
    costs = LayerTimes(layers, layers, layers, 1.0, 1.0, layers, layers, 1.0, 1.0).table(table.partition)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    walls = []
    try:
        with CpuBackend() as backend:
            for _ in range(request.num_warmup_steps + request.num_steps):
                training = Training(workload, table, Settings(recompute="none"))
                timeline = execute(training.program(costs, real_time=True), training.handlers, backend)
                walls.append(float(timeline.makespan))
    finally:
        torch.set_num_threads(threads)
    return median(walls[request.num_warmup_steps :])
