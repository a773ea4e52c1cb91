"""Figure 17 with a fused stage whose forward waits for its input, as it must on a machine: our own statements."""

from collections.abc import Iterator

from analysis.claims.claim import Claim, section
from analysis.claims.evidence import Need, causal, figure17, steady_causal, steady_state
from analysis.claims.ours import stated
from analysis.claims.printed import Printed, rows
from analysis.exhibits.style import model_name
from analysis.records.paper import PUBLISHED_MODELS

_SENSE = "waiting can only take time"


@section(30, "Figure 17 with a causal fused stage", _SENSE)
def claims() -> Iterator[Claim]:
    """The bubble of each model's call and of its calls back to back, and that waiting is never faster."""
    for model, name in PUBLISHED_MODELS.items():
        words = f"RoundPipe on {model_name(model)}, a fused stage that waits: bubble of one call"
        needs = (causal(model),)
        yield stated(f"causal/{model}/single", words, "%", needs, lambda run: 100 * run["bubble_makespan"])
        yield _not_faster(f"causal/{model}/single_not_faster", model, figure17("roundpipe", model), causal(model))
        for row in rows("async_bubble", model=name, kind="simulated"):
            count = int(row["num_microbatches_per_call"])
            yield from _back_to_back(model, count)


def _back_to_back(model: str, count: int) -> Iterator[Claim]:
    waits = steady_causal(model, count)
    words = f"RoundPipe on {model_name(model)}, a fused stage that waits: bubble of calls of {count} back to back"
    name = f"causal/{model}/steady_{count}"
    yield stated(name, words, "%", (waits,), lambda run: 100 * run["bubble_steady"])
    yield _not_faster(f"{name}_not_faster", model, steady_state(model, count), waits)


def _not_faster(name: str, model: str, *needs: Need) -> Claim:
    return Claim(
        id=name,
        statement_id="causal/waiting_is_not_faster",
        whose="ours against ours",
        statement=f"RoundPipe on {model_name(model)}: a fused stage that waits for its input is not faster",
        metric="time saved by waiting",
        unit="ms",
        published=Printed("0", _SENSE),
        relation="<=",
        tolerance=1e-6,
        needs=needs,
        value=lambda first, second: 1e3 * (float(first["step_time_s"]) - float(second["step_time_s"])),
    )
