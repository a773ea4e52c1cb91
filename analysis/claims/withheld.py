"""Claims of the paper whose numbers are not in our tables: what testing them would need."""

from collections.abc import Iterator

from analysis.claims.claim import Claim

SECTION = "Claims on other machines"

_A800 = "eight A800 80 GB SXM"
_4090 = "eight RTX 4090 and 800 GB of host memory"

_CLAIMS = (
    (
        "figure12",
        "figure 12 (section 5.2)",
        "Throughput of seven systems on 8 A800",
        "throughput",
        "tokens/s",
        _A800,
    ),
    (
        "figure13",
        "figure 13 (section 5.2)",
        "Longest sequences on 8 A800",
        "longest sequence",
        "tokens",
        _A800,
    ),
    (
        "figure14",
        "figure 14 (section 5.5)",
        "Cost of training on a billion tokens, 8 RTX 4090 against 8 A800",
        "cost",
        "USD per 1e9 tokens",
        f"{_A800}, and {_4090}",
    ),
    (
        "figure15",
        "figure 15 (section 5.6)",
        "RoundPipe scales from 1 to 8 RTX 4090",
        "throughput",
        "tokens/s",
        _4090,
    ),
    (
        "figure16",
        "figure 16 (section 5.7)",
        "Throughput of RoundPipe from 512 to 65,536 tokens a sequence",
        "throughput",
        "tokens/s",
        _4090,
    ),
    (
        "convergence",
        "artifact, library documentation",
        "Weights one step old do not hurt convergence in practice",
        "loss",
        "",
        "training runs to convergence with synchronous and asynchronous steps; the artifact holds no loss curve",
    ),
)


def claims() -> Iterator[Claim]:
    """One claim a figure; without numbers, because none is in `analysis/published/`."""
    for name, where, statement, metric, unit, needed in _CLAIMS:
        yield Claim(
            id=f"withheld/{name}",
            section=SECTION,
            source=f"RoundPipe, {where}",
            statement=statement,
            metric=metric,
            unit=unit,
            evidence="measured",
            not_testable=needed,
        )
