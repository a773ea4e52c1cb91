"""`check-order`: may a wait be missing? A schedule's order of streams on accelerators, checked on CPU tensors."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rpbench.config.choices import ConfigError
from rpbench.config.loading import load
from rpbench.config.request import Request
from rpbench.engine.backends.threads import one_thread
from rpbench.engine.stream_order.mutants import summary
from rpbench.engine.verification import verified
from rpbench.run.modes import train
from rpbench.run.scheduled import assembled_of

_SHOWN = 20  # findings that are printed; all are counted


def check_order(arguments: Sequence[str]) -> tuple[dict[str, Any], bool]:
    """The faults in the order that a training run would issue to accelerators, and whether there are none.

    The run computes real tensors; its gradients and weights are compared with plain training bit for bit.
    """
    request, mutants = _request(arguments)
    assembled = assembled_of(request)
    train.check_request(request, assembled)
    with one_thread():
        ran = train.run_accelerated(request, assembled)
        findings = ran.fields["order_findings"]
        found = {
            "schedule": request.schedule.chosen,
            "num_devices": request.num_devices,
            "num_accelerators": len(ran.fields["accelerators"]),
            "num_entries": ran.fields["order_num_entries"],
            "num_findings": len(findings),
            "findings": findings[:_SHOWN],
        } | verified(ran.training)
    if mutants:
        assert ran.trace is not None  # of a dry run there is one
        found |= summary(ran.trace)
    bits = ("grad_max_abs_diff", "weight_max_abs_diff")
    return found, not found["num_findings"] and not any(found[name] for name in bits)


def _request(arguments: Sequence[str]) -> tuple[Request, bool]:
    own = dict(item.split("=", 1) for item in arguments if item.startswith(("accelerators=", "mutants=")))
    num, mutants = own.get("accelerators", "1"), own.get("mutants", "no")
    if not num.isdigit() or not int(num):
        raise ConfigError(f"accelerators={num}: how many the devices share, 1 or more")
    if mutants not in ("yes", "no"):
        raise ConfigError(f"mutants={mutants}: yes or no")
    rest = [item for item in arguments if item.partition("=")[0] not in own]
    if any(item.startswith(("backend=", "mode=")) for item in rest):
        raise ConfigError("check-order runs backend=device dry: leave backend= and mode= out")
    words = ["model=tiny_gpt", "dtype=float64", "num_steps=2", "offload=auto", *rest, "backend=device", "verify=true"]
    request = load([*words, f"backend.dry_accelerators={num}"])
    return replace(request, overrides=tuple(arguments)), mutants == "yes"
