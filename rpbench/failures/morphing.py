"""Morphing: depth, width and microbatch that train fastest on the devices that are left, at the same total batch.

For each number of stages P that divides the number of cut points, on G >= P devices: the largest microbatch that fits,
width = floor(G / P) pipelines, and ceil(floor(batch / width) / microbatch) microbatches a pipeline. All of them are
simulated, and the fastest is taken. G - P * width devices idle.

Source: Athlur et al., "Varuna: Scalable, Low-cost Training of Massive Deep Learning Models", EuroSys'22; the rule as in
its released code. That microbatches are tried in powers of two up to the pipeline's part of the batch is ours.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Self

from rpbench.failures.walk import Checkpoint, Job, Progress, Recovery


@dataclass(frozen=True)
class Form:
    """A division of devices into pipelines, with its simulated run."""

    stages: int
    width: int
    microbatch: int  # sequences
    num_microbatches: int  # of a pipeline
    job: Job


class NoForm(ValueError):
    """The devices cannot be divided so that the model fits."""


Simulate = Callable[[int, int, int, int], Job | None]
"""(stages, width, sequences of a microbatch, microbatches) -> the job; None if it does not fit."""


def candidates(num_devices: int, cut_points: int, batch: int) -> Iterator[tuple[int, int, int]]:
    """(stages, width, sequences of each pipeline) of every form whose pipelines have at least one sequence."""
    for stages in range(1, min(num_devices, cut_points) + 1):
        width = num_devices // stages
        if cut_points % stages == 0 and batch // width:
            yield stages, width, batch // width


def best_form(num_devices: int, cut_points: int, batch: int, sizes: tuple[int, ...], simulate: Simulate) -> Form:
    """The form with the shortest step, of equals the one with fewest stages; NoForm if none fits.

    The model may be cut at `cut_points` places, its end counted. A step has `batch` sequences, a microbatch one of
    `sizes`, of which the largest that fits is taken.
    """
    found = []
    for stages, width, part in candidates(num_devices, cut_points, batch):
        for size in sorted((size for size in sizes if size <= part), reverse=True):
            number = -(-part // size)  # the last one filled up
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


@dataclass(frozen=True, kw_only=True)
class Varuna(Checkpoint):
    """Restart from the checkpoint in the best form for the devices that are left of `num_devices`."""

    find: Callable[[int], Form]
    num_devices: int
    form: Form

    @classmethod
    def begin(cls, find: Callable[[int], Form], num_devices: int, every: int) -> Self:
        """The policy on all devices; NoForm if no form fits."""
        form = find(num_devices)
        return cls(form.job, every, find=find, num_devices=num_devices, form=form)

    def recover(self, lost: frozenset[int], progress: Progress) -> Recovery:
        """Recovery from the last checkpoint, in another form; every new rank reads its own layers."""
        gone = self.lost | lost
        form = self.find(self.num_devices - len(gone))
        return self.from_store(progress, replace(self, job=form.job, form=form, lost=gone))
