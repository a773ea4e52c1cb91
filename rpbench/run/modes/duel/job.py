"""A job: what a start is asked for."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rpbench.config.choices import Duel
from rpbench.config.request import Request
from rpbench.engine.state.optimizer import OptimizerSettings
from rpbench.plan.whole import WholePlan
from rpbench.run.modes.duel.contenders import Contender
from rpbench.run.modes.duel.verdict import Rules
from rpbench.workload.architecture import Architecture


@dataclass(frozen=True)
class Job:
    """What a start is asked for; every start of a duel is asked for the same but the seed.

    Args:
        sequences: of a microbatch.
        seed: of weights and tokens.
        order_seed: of the order of runs.
        families: names of entrants that run one after the other, as in a run-off; empty where references are
            scattered among all.
        budget_s: no turn begins after that.
    """

    model: Architecture
    sequences: int
    num_microbatches: int
    num_steps: int
    num_devices: int
    dtype: str
    seed: int
    optimizer: OptimizerSettings
    entrants: tuple[Contender, ...]
    plans: Mapping[str, WholePlan]
    rules: Rules
    budget_s: float
    timeout_s: float
    order_seed: int
    families: tuple[tuple[str, ...], ...] = ()


def job_of(request: Request, entrants: Sequence[Contender], plans: Mapping[str, WholePlan]) -> Job:
    """What a request asks of every start."""
    mode, model, asked = request.mode, request.model, request.optimizer
    assert isinstance(mode, Duel)
    assert model is not None
    return Job(
        model=model,
        sequences=request.workload.microbatch_sequences,
        num_microbatches=request.num_microbatches,
        num_steps=request.num_steps,
        num_devices=request.num_devices,
        dtype=request.dtype,
        seed=request.seed,
        optimizer=OptimizerSettings(asked.learning_rate, asked.weight_decay),
        entrants=tuple(entrants),
        plans=plans,
        rules=Rules(half_width=mode.half_width, least_starts=max(Rules.least_starts, mode.num_starts)),
        budget_s=mode.budget_s,
        timeout_s=mode.timeout_s,
        order_seed=request.seed,
    )
