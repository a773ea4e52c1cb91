"""Published runs action by action: the schedule that a system runs, with the settings of its script, as record fields.

Beside the pace of the simulated schedule stands that of the predictor of systems, with the terms of both: where they
differ, the terms say by what.
"""

from typing import Any

from rpbench.advice.published_runs import Simulated, simulated
from rpbench.cost.machine import Machine
from rpbench.predict import Prediction, predict
from rpbench.predict.case import Case


def published_run_fields(case: Case, cluster: Machine) -> dict[str, Any]:
    """What simulation and prediction say of a published run.

    Raises:
        ValueError: for a system without a schedule, or one that the model cannot be cut for.
    """
    return _fields(simulated(case, cluster), predict(case, with_interval=False))


def _fields(found: Simulated, predicted: Prediction) -> dict[str, Any]:
    outcome, setting, settings = found.outcome, found.setting, found.case.settings
    return {
        "status": "ok" if outcome.fits else "infeasible",
        "reason": None if outcome.fits else f"{outcome.misfit:.2f} times the memory that there is",
        "evidence": "predicted",
        "system": found.case.system,
        "generator": found.contender.entry.name,
        "settings": settings.source,
        "tokens_per_step": found.case.tokens_per_step,
        "tokens_per_s": found.tokens_per_s if outcome.fits else None,
        "step_time_s": found.step_time_s,
        "step_terms_s": dict(found.why),
        "lacks": list(found.lacks),
        "microbatch_sequences": setting.microbatch_sequences,
        "num_microbatches": round(settings.global_sequences / setting.microbatch_sequences),
        "recompute": setting.recompute,
        "schedule_options": dict(setting.options),
        "partition_layers": str(found.partition),
        "peak_memory_bytes": [outcome.peak_bytes] * found.case.num_devices,
        "host_memory_bytes": outcome.host_bytes,
        "predicted_status": predicted.status,
        "predicted_tokens_per_s": predicted.tokens_per_s,
        "predicted_terms_s": predicted.terms,
    }
