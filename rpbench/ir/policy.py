"""Weight policies: which version of the weights forward and backward read.

A version is the number of optimizer steps a stage's weights have seen. Versions are not stored by generators;
`rpbench.ir.checks.versions` finds them by replaying an order.
"""

from enum import Enum


class Policy(Enum):
    """t: step of a microbatch; newest: the last version its stage has published when the action runs.

    | policy     | forward reads       | backward reads     | paper                              |
    | flush      | t                   | the same           | GPipe                              |
    | stash      | newest              | the same           | PipeDream                          |
    | vertical   | newest at stage 0   | the same           | PipeDream, vertical sync           |
    | 2bw        | t - 1               | the same           | PipeDream-2BW                      |
    | latest     | newest              | newest             | PipeMare                           |
    | predict    | newest (+ forecast) | newest             | PipeOptim, XPipe, SpecTrain        |
    | delayed    | t - 1               | the same           | ZeRO-Offload DPU, RoundPipe async, |
    |            |                     |                    | cyclic data parallelism (CDP-v1)   |
    | optimistic | t                   | the same           | zero-bubble post-validation        |
    | cyclic     | t if s + i >= S - 1, | the same          | cyclic data parallelism (CDP-v2),  |
    |            | t - 1 elsewhere     |                    | stage s of S on worker i           |
    | trial      | t - 1               | the same           | ACCO: every other step is a trial  |
    | selective  | t, the rest older   | the same           | ZenFlow (`rpbench.ir.waits.late_rest`)   |

    A forecast is made by the first microbatch of a step, and the others of that step share it.
    """

    FLUSH = "flush"
    STASH = "stash"
    VERTICAL = "vertical"
    TWO_BW = "2bw"
    LATEST = "latest"
    PREDICT = "predict"
    DELAYED = "delayed"
    OPTIMISTIC = "optimistic"
    CYCLIC = "cyclic"
    TRIAL = "trial"
    SELECTIVE = "selective"


# Version read is a function of the step alone: t minus this.
STEPS_BEHIND = {
    Policy.FLUSH: 0,
    Policy.OPTIMISTIC: 0,
    Policy.SELECTIVE: 0,
    Policy.TWO_BW: 1,
    Policy.DELAYED: 1,
    Policy.TRIAL: 1,
}
# Version read follows from microbatch and stage, so that it is known before anything runs.
KNOWN = (*STEPS_BEHIND, Policy.CYCLIC)
# One step per microbatch is what these policies are made for; the others step once per `num_microbatches`.
ASYNCHRONOUS = frozenset({Policy.STASH, Policy.VERTICAL, Policy.LATEST, Policy.PREDICT})


def is_trial(policy: Policy, version: int) -> bool:
    """Whether the STEP to a version is a trial: its weights are read, then masters, moments and count are as before.

    Under policy trial it is that of every odd version; the STEP to the next one starts where the trial started.
    """
    return policy is Policy.TRIAL and version % 2 == 1


def versions_averaged(policy: Policy, version: int) -> tuple[int, ...]:
    """The versions over whose windows of microbatches the STEP to a version takes the mean gradient.

    After a trial both: its own, and that of the trial.
    """
    return (version - 1, version) if policy is Policy.TRIAL and version % 2 == 0 else (version,)


def update_of(policy: Policy, version: int) -> int:
    """The update, counted from 1, that the STEP to a version makes or tries: what a learning rate goes by."""
    return (version + 1) // 2 if policy is Policy.TRIAL else version
