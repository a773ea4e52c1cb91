"""What the tests of torch's runtime share: a model, cuts of it, and schedules near a size."""

from nearby import nearby

from rpbench.ir.partition import symmetric
from rpbench.ir.schedule import Schedule, Shape
from rpbench.registry import entries, entry
from rpbench.torch_runtime.request import TorchRequest, make_request
from rpbench.workload.architecture import Architecture

FAITHFUL = (
    "1f1b", "adaptive_1f1b", "dapple", "gpipe", "two_bp", "zb_auto", "zb_h1", "zb_h2", "interleaved_1f1b", "looped_bfs",
    "interleaved_zb", "hanayo", "zb_v", "v_half", "v_min", "dualpipe_v",
)  # fmt: skip
TWO_WAY = ("chimera", "dualpipe", "bitpipe")
REFUSED = {
    "asynchronous": "acco cyclic_dp pipedream pipedream_2bw pipelined_backprop pipemare pipeoptim spectrain xpipe "
    "zenflow",
    "its weights are streamed": "greedysnake megatrain mobius roundpipe",
    "stands on lane h2d": "bpipe pipe_offload",
    "copies of whole pipelines are data parallelism": "data_parallel superoffload tawpipe weipipe zero_2 zero_3 "
    "zero_infinity zero_offload",
    "2 segments of sequences": "seq1f1b",
    "4 shards of every matrix": "megatron_tp",
    "a part of the head": "interlaced vocab_parallel",
    "0R0 has no token": "mario varuna",
    "overlaps one forward with one backward": "stp",
}
_NAMED = {*FAITHFUL, *TWO_WAY, *(name for names in REFUSED.values() for name in names.split())}
LATER = tuple(name for name in entries() if name not in _NAMED)  # whatever came since is held to the same
NUM_LAYERS = 16
TINY = Architecture("tiny", num_layers=NUM_LAYERS, hidden=8, heads=2, vocab=19, seq_len=3, gated=False)


def uneven(num_stages: int) -> tuple[int, ...]:
    """1, 2 and 3 layers, then one each, the rest last."""
    counts = [1, 2, 3, *[1] * num_stages][: num_stages - 1]
    return (*counts, NUM_LAYERS - sum(counts))


def schedule_near(name: str, num_ranks: int, num_microbatches: int, chunks: int | None = None) -> Schedule:
    """A schedule with an uneven cut, of the nearest size it takes."""
    p, v, m = nearby(name, num_ranks, chunks or entry(name).chunks or 2, num_microbatches)
    return entry(name).build(Shape(p, p * v, m)).with_partition(symmetric(uneven(p * v)))


def request_for(name: str, num_ranks: int = 2, num_microbatches: int = 4, **fields: object) -> TorchRequest:
    """A verified request in float64."""
    schedule = schedule_near(name, num_ranks, num_microbatches)
    return make_request(schedule, TINY, **({"dtype": "float64", "verify": True} | fields))
