"""Steps of the two systems that stream weights from the host: RoundPipe, and Mobius.

RoundPipe deals the released planner's stages to the devices in rotation, call after call; a step is `num_calls` calls
of `num_microbatches` each, simulated with its transfers and its optimizer (`rpbench.predict.streaming`).

One interpreter runs the loop over experts for all devices, in forward and recomputation. It alternates between the
devices whose layers wait for it; kernels run beside it. While the optimizer's threads fill the host's cores it has a
fraction of one core.

Mobius has more stages than devices, bound to them in turns; every stage runs for all microbatches at a time. Neither
its source nor its settings are public. Its order here is a looped breadth-first pipeline, with the cut that RoundPipe's
artifact simulates for it, the same transfers, the optimizer on the host behind each step, and a process per device,
so that loops over experts run side by side. It is a stand-in.

Source: RoundPipe, arXiv 2604.27085; planner, dispatch, transfers and optimizer as in its released library. Feng et al.,
"Mobius: Fine Tuning Large-Scale Models on Commodity GPU Servers", ASPLOS'23; settings assumed.
"""

from dataclasses import replace

from rpbench.cost.footprint.sizes import model_bytes
from rpbench.cost.hardware.basis import Basis
from rpbench.cost.published import published_partition
from rpbench.cost.table import LayerTimes
from rpbench.ir.partition import Partition, symmetric
from rpbench.mesh.layers.layer_times import times_of
from rpbench.plan.even_and_greedy import MEMORY_SHARE, plan_released
from rpbench.predict.case import Case, Terms, waiting_s
from rpbench.predict.streaming import Jobs, Run, devices_per_complex, timed

# Visits of stages to devices over which the interval between asynchronous steps is taken, and the most steps.
TIMED_VISITS, MOST_STEPS = 300, 4


def asynchronous_step(case: Case, basis: Basis) -> Terms:
    """Seconds of a step whose optimizer runs on the host beside the next step."""
    jobs = asynchronous_jobs(case)
    return _terms(timed(jobs, case, basis), *timed_steps(jobs))


def synchronous_step(case: Case, basis: Basis) -> Terms:
    """Seconds of a step that ends with the optimizer."""
    run = timed(synchronous_jobs(case), case, basis)
    return _terms(run, -1, 0) | {"optimizer": run.finished_s(0) - run.computed_s(0)}


def asynchronous_jobs(case: Case, visits: int = TIMED_VISITS) -> Jobs:
    """The jobs of the timed steps, of as many steps before them, and of one after them, with which they overlap."""
    step = synchronous_jobs(case)
    timed_ones = min(MOST_STEPS, max(1, visits // step.visits))
    return replace(step, steps=2 * timed_ones + 1, asynchronous=True)


def synchronous_jobs(case: Case) -> Jobs:
    chunks, calls = case.settings.chunks, case.settings.num_calls
    routed = case.model.experts is not None
    complexes = devices_per_complex(case.basis)
    return Jobs(
        planned(case), case.num_devices, chunks.num, calls, 1, False, routed=routed, devices_per_complex=complexes
    )


def timed_steps(jobs: Jobs) -> tuple[int, int]:
    """(a, b): asynchronous steps are timed from the end of step a to the end of step b."""
    half = jobs.steps // 2
    return half - 1, 2 * half - 1


def planned(case: Case) -> Partition:
    """The released planner's partition for a case, from the declared constants."""
    return _planned(case, times_of(case.setting(case.chunk_tokens)))


def first_plan(case: Case) -> Partition:
    """The released planner's partition before layers have been timed: their bytes stand in for times.

    A backward counts twice a forward. Small layers beside a large head then make long stages.
    """
    sizes = model_bytes(case.model, 1)
    layers, head = [float(layer.weights) for layer in sizes.layers], float(sizes.head.weights)
    return _planned(case, LayerTimes(layers, layers, layers, head_forward=head, head_backward=head))


def _planned(case: Case, times: LayerTimes) -> Partition:
    """A plan in which each stage and the next fit the planner's limit; the planner takes gibibytes for gigabytes."""
    memory = case.basis.get("device_memory_bytes", float("inf"))
    limit = None if memory == float("inf") else int(MEMORY_SHARE * memory / 2**30 * 1e9)
    sizes = model_bytes(case.model, max(1, round(case.chunk_tokens)))
    return plan_released(times, case.num_devices, sizes=sizes, memory_limit_bytes=limit)


def _terms(run: Run, first: int, last: int) -> Terms:
    """Seconds of a step by cause, as a mean over devices and the steps after `first` up to `last`."""
    steps = range(first + 1, last + 1)
    seconds = (run.computed_s(last) - (run.computed_s(first) if first >= 0 else 0.0)) / len(steps)
    computing, looping = run.busy_s(steps)
    return {"computation": computing, "expert loop": looping, "idle": seconds - computing - looping}


# --- Mobius --------------------------------------------------------------------------------------------------


def mobius_step(case: Case, basis: Basis) -> Terms:
    run = timed(mobius_jobs(case), case, basis)
    computed, (computing, _) = run.computed_s(0), run.busy_s(range(1))
    waiting = case.settings.chunks.num * waiting_s(case.model, basis) / case.num_devices
    return {
        "computation": computing,
        "expert loop": waiting,
        "idle": computed - computing,
        "optimizer": run.finished_s(0) - computed,
    }


def mobius_jobs(case: Case) -> Jobs:
    num, complexes = case.settings.chunks.num, devices_per_complex(case.basis)
    return Jobs(mobius_cut(case), case.num_devices, num, 1, 1, False, bound=True, devices_per_complex=complexes)


def mobius_cut(case: Case) -> Partition:
    """The artifact's cut for eight devices; elsewhere stages of equal numbers of layers, about one each."""
    devices, layers = case.num_devices, case.model.num_layers
    if devices == 8 and case.model.published_name:
        return published_partition("looped_bfs", case.model.published_name)
    stages = -(-layers // devices) * devices
    return symmetric(tuple(int(stage < layers) for stage in range(stages)))
