"""Trained: what `experiment=convergence` says on any processor, where single losses differ by digits or more.

Two schedules with the same weights at the same microbatch train alike whoever orders the work, and after 24 updates a
step's delay costs more than what processors make of a loss. Curves of 96 updates hold no order: seeds differ by more.
"""

from collections.abc import Iterator

from analysis.claims.claim import Claim, section
from analysis.claims.evidence import Need
from analysis.claims.printed import Printed

_EXPERIMENT = "convergence"
_SEEDS = (0, 1, 2)
_ALIKE = (("roundpipe", "gpipe"), ("roundpipe_async", "pipedream_2bw"))
_IN_ORDER = ("gpipe", "xpipe", "pipedream_2bw")
_LARGEST = 1e-3  # of a loss, between two orders of the same sums


@section(150, "Losses on any processor")
def claims() -> Iterator[Claim]:
    """For each seed: who trains alike, and who is ahead of whom."""
    for seed in _SEEDS:
        for one, other in _ALIKE:
            yield _claim(
                f"alike/{one}/{other}/{seed}",
                f"Largest difference of the losses of {one} and {other}, seed {seed}",
                "0.0",
                (one, other),
                seed,
                relation="<=",
                tolerance=_LARGEST,
                value=lambda first, second: max(
                    abs(mine - theirs) for mine, theirs in zip(first["loss_curve"], second["loss_curve"], strict=True)
                ),
            )
        yield _claim(
            f"order/{seed}",
            f"Schedules of 24 updates by their last loss, the least first, seed {seed}",
            ", ".join(_IN_ORDER),
            _IN_ORDER,
            seed,
            value=lambda *runs: ", ".join(run["schedule"] for run in sorted(runs, key=lambda run: run["loss"])),
        )


def _claim(name: str, words: str, due: str, schedules: tuple[str, ...], seed: int, **more: object) -> Claim:
    return Claim(
        id=f"trained/{name}",
        whose="ours against ours",
        source=f"conf/experiment/{_EXPERIMENT}.yaml",
        statement=words,
        published=Printed(due, "the same weights at the same microbatch"),
        needs=tuple(Need(_EXPERIMENT, {"schedule": name, "seed": str(seed)}) for name in schedules),
        **more,  # type: ignore[arg-type]
    )
