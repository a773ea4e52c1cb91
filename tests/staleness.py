"""The largest staleness of each backward stage, in steps."""

from rpbench.ir.checks.versions import Versions


def staleness_of_stages(versions: Versions) -> tuple[int, ...]:
    """One number for each backward stage."""
    of = versions.staleness_steps
    return tuple(
        max((steps for (own, _), steps in of.items() if own == stage), default=0) for stage in range(len(versions.live))
    )
