"""Sample: what one run of a contender took."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Sample:
    """One run of all steps, the optimizer's among them.

    Args:
        wall_s: by the clock on the wall.
        replay_s: what the actions' processor times give on the same action graph, whatever else the machine did.
        cpu_s: these times together.
        elapsed_s: that passed in which other programs were watched.
        others_s: processor time that they had meanwhile; None where the system does not say.
        loss: of the last step; None if it is not ours to know.
    """

    wall_s: float
    replay_s: float
    cpu_s: float
    elapsed_s: float
    others_s: float | None
    loss: float | None = None
