"""GreedySnake: a model outside the device passes through it once forward and once backward, for any batch size.

All microbatches of a layer run before the next layer does (vertical order), so that weights are loaded twice a step and
a gradient is stored once. In horizontal order, one microbatch after another (`zero_infinity` with several
microbatches), weights are loaded twice for each microbatch. In return boundary tensors wait outside the device as well.
The order of the microbatches reverses at every layer, so that the last tensor of one layer is the first that the next
one reads and need not leave. With 3 layers and 4 microbatches on one device:

    h2d       0LOAD:P 1LOAD:P          1RECV_F2 1RECV_F1 1RECV_F0 2LOAD:P ...
    compute           0F0 0F1 0F2 0F3  1F3 1F2 1F1 1F0  2F0 2F1 2F2 2F3  2B3 2B2 2B1 2B0  1B0 1B1 1B2 1B3  0B3 ...
    d2h               0SEND_F0 0SEND_F1 0SEND_F2        1SEND_F3 ...
    host                                                                  2STEP@1 ...

The host steps a layer when its gradient has arrived. `delayed` is the fraction of the layers whose step is put off:
these steps run beside the next forward, in the order in which it needs them, and no forward reads an old weight.

Source: Yue et al., "GreedySnake: Accelerating SSD-Offloaded LLM Training with Efficient Scheduling and Optimizer Step
Overlapping", arXiv 2512.17570, from its abstract; the order of transfers follows from it.
"""

from collections.abc import Callable, Iterator

from baselines.data_parallel.data_parallel import own_part
from rpbench.ir.action import Action, Kind
from rpbench.ir.schedule import ON_SSD, Schedule, Shape, Weights, check_even, step_rows
from rpbench.passes.lower import add_steps, each_row
from rpbench.passes.offload import keep_on_ssd, stream
from rpbench.registry import schedule


def _lower(order: Schedule, *, prefetch: int, delayed: float, ssd: str = "none") -> Schedule:
    """The order with host steps and transfers. Of each version, steps that are not put off come first, as they become
    due; the others follow by layer."""

    def place(step: Action) -> tuple[int, int]:
        late = int((step.stage + 1) * delayed) > int(step.stage * delayed)
        return (step.version or 0, 1 + step.stage if late else 0)

    stepped = with_host_steps(order, place)
    return keep_on_ssd(stream(stepped, prefetch=prefetch, activations=True, spill=True), ssd)


def with_host_steps(order: Schedule, place: Callable[[Action], tuple[int, ...]]) -> Schedule:
    """The order with a STEP of every stage on the host lane, sorted by `place`."""
    stepped = add_steps(order, lane="host")
    return each_row(stepped, lambda lane, row: sorted(row, key=place) if lane == "host" else row)


@schedule("greedysnake", source="arXiv 2512.17570", looped=True, lower=_lower, searched={"ssd": tuple(ON_SSD)})
def greedysnake(shape: Shape, *, delayed: float = 0.0, ssd: str = "none") -> Schedule:
    """Layer by layer over all microbatches, whose order reverses at every layer.

    Args:
        delayed: fraction of the layers whose step runs beside the next forward; evenly spread.
        ssd: what lives on the host's SSDs: none, optimizer (its state), or all (weights as well).
    """
    if isinstance(delayed, bool) or not isinstance(delayed, int | float) or not 0 <= delayed <= 1:
        raise ValueError(f"schedule.delayed={delayed}: the fraction of the layers, from 0 to 1; try 0.3")
    check_even("greedysnake", shape)
    rows = step_rows(shape, lambda rank, batch: _step(shape.num_stages, own_part(shape, rank, batch)))
    return Schedule(shape, rows, name="greedysnake", weights=Weights.STREAMED)


def _step(num_stages: int, own: range) -> Iterator[Action]:
    for kind, order in ((Kind.F, range(num_stages)), (Kind.B, reversed(range(num_stages)))):
        for stage in order:
            up = (stage % 2 == 0) == (kind is Kind.F)
            yield from (Action(kind, stage, microbatch) for microbatch in (own if up else reversed(own)))
