"""Morphing: depth, width and microbatch that train fastest on the devices that are left, at the same total batch.

For each number of stages P that divides the number of cut points and is at most G, the devices: the largest microbatch
that fits, floor(G / P) pipelines, and as many microbatches as each pipeline's part of the batch makes,
ceil(floor(batch / width) / microbatch). All of them are simulated; the fastest is taken. G - P * width devices idle.

Source: Athlur et al., "Varuna: Scalable, Low-cost Training of Massive Deep Learning Models", EuroSys'22; the rule as in
its released code. That microbatches are tried in powers of two up to the pipeline's part of the batch is ours.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

from rpbench.failures.checkpoint import Checkpoint, from_store
from rpbench.failures.job import Job
from rpbench.failures.walk import Progress, Recovery


@dataclass(frozen=True)
class Form:
    """How devices are divided.

    Args:
        microbatch: sequences of a microbatch.
        num_microbatches: of a step, of each pipeline.
        job: what is known of a run in this form.
    """

    stages: int
    width: int
    microbatch: int
    num_microbatches: int
    job: Job


class NoForm(ValueError):
    """Devices that cannot be divided so that the model fits."""


Simulate = Callable[[int, int, int, int], Job | None]
"""(stages, width, sequences of a microbatch, microbatches) -> the job; None if it does not fit."""


def divisors(number: int) -> list[int]:
    """The numbers that divide a number, from below."""
    return [each for each in range(1, number + 1) if number % each == 0]


def candidates(num_devices: int, cut_points: int, batch: int) -> Iterator[tuple[int, int, int]]:
    """(stages, width, sequences of each pipeline) of every form; a pipeline without a sequence is none."""
    for stages in divisors(cut_points):
        width = num_devices // stages
        if width and batch // width:
            yield stages, width, batch // width


def microbatches(part: int, microbatch: int) -> int:
    """As many as a pipeline's part of the batch makes, the last one filled up."""
    return -(-part // microbatch)


def best_form(num_devices: int, cut_points: int, batch: int, sizes: tuple[int, ...], simulate: Simulate) -> Form:
    """The form that takes the fewest seconds a step; of equals, the one with fewest stages.

    Args:
        cut_points: places where the model may be cut, its end counted.
        batch: sequences of a step.
        sizes: of microbatches, to be tried from the largest that a part has down to the first that fits.

    Raises:
        NoForm: if none fits.
    """
    found = []
    for stages, width, part in candidates(num_devices, cut_points, batch):
        for size in sorted((size for size in sizes if size <= part), reverse=True):
            number = microbatches(part, size)
            job = simulate(stages, width, size, number)
            if job is not None:
                found.append(Form(stages, width, size, number, job))
                break
    if not found:
        raise NoForm(
            f"{num_devices} devices: no number of stages that divides {cut_points} cut points fits with any "
            f"microbatch of {', '.join(map(str, sizes))} sequences; take more devices or more memory"
        )
    return min(found, key=lambda form: (form.job.step_s, form.stages))


@dataclass(frozen=True)
class Varuna:
    """Restart from the checkpoint in the best form for the devices that are left.

    Args:
        find: number of devices -> the best form.
        num_devices: at the start.
        store_every: steps from one checkpoint to the next.
        lost: devices that are gone.
    """

    find: Callable[[int], Form]
    num_devices: int
    store_every: int
    lost: frozenset[int] = field(default_factory=frozenset)

    @cached_property
    def form(self) -> Form:
        return self.find(self.num_devices - len(self.lost))

    def step_s(self, number: int) -> float:
        """A step in the present form, with the checkpoint where one follows it."""
        return Checkpoint(self.form.job, self.store_every).step_s(number)

    def living(self, ranks: frozenset[int]) -> frozenset[int]:
        """Those that are not gone."""
        return ranks - self.lost

    def recover(self, lost: frozenset[int], progress: Progress) -> Recovery:
        """Back to the last checkpoint, in another form; every new rank reads its own layers."""
        then = replace(self, lost=self.lost | lost)
        return from_store(self.form.job, self.store_every, progress, then, then.form.job.all_state_bytes)
