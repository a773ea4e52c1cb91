"""`profile`: the layers of a model in the form that PipeDream's partitioner reads, measured or from a cost table."""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rpbench.config.choices import ConfigError, typed
from rpbench.config.loading import load
from rpbench.config.request import Request
from rpbench.config.without_effect import check_without_effect, key_of
from rpbench.cost.footprint.sizes import model_bytes
from rpbench.cost.layer_graph import Layer, LayerGraph, chain, to_csv
from rpbench.records import record
from rpbench.run.assemble import pose
from rpbench.workload.architecture import Architecture

MEASURED = ("model", "workload", "dtype", "seed", "results_dir")  # keys of a run that a measurement takes
LOSS_BYTES = 4  # one float, all that the head hands on


@dataclass
class ProfileRequest:
    """Keys of the verb; the files are `<out>_nodes.csv` and `<out>_edges.csv`."""

    out: str | None = None
    num_runs: int = 10


def write_profile(arguments: Sequence[str]) -> dict[str, Any]:
    """Write the profile of a model; its paths and sums, as JSON-ready data.

    Arguments are the keys of `ProfileRequest` and overrides of a run. With `cost=NAME` times come from that table,
    otherwise they are measured here. ValueError for a wrong request, before anything is measured.
    """
    own = {key: value for key, _, value in (item.partition("=") for item in arguments) if key in ("out", "num_runs")}
    asked = typed(ProfileRequest, own)
    if not 1 <= asked.num_runs <= 1000:
        raise ConfigError(f"num_runs={asked.num_runs}: a whole number from 1 to 1,000")
    overrides = [item for item in arguments if item.partition("=")[0] not in own]
    request = load(overrides)
    check_without_effect(request, "profile")
    prefix = Path(asked.out or request.results_dir / "profiles" / request.model_name)
    record.check_writable(prefix.parent, "out" if asked.out else "results_dir")
    from_table = any(item.startswith("cost=") for item in overrides)
    _check_words(arguments, overrides, from_table=from_table)
    if from_table and request.cost.name == "unit":
        raise ConfigError(
            "cost=unit: its slots are no milliseconds; take cost=analytic cluster=NAME, or leave cost= out and measure"
        )
    graph = _from_table(request) if from_table else _measured(request, asked.num_runs)
    paths = [prefix.with_name(f"{prefix.name}_{table}.csv") for table in ("nodes", "edges")]
    for path, text in zip(paths, to_csv(graph), strict=True):
        record.write_atomically(path, text)
    return {
        "profile": str(paths[0]),
        "edges": str(paths[1]),
        "model": request.model_name,
        "times": request.cost.name if from_table else "measured",
        **(
            {"schedule": request.entry.name, "num_devices": request.num_devices} if from_table else {}
        ),  # they depend on
        "num_layers": len(graph.layers),
        "forward_ms": sum(layer.forward_ms for layer in graph.layers),
        "backward_ms": sum(layer.backward_ms for layer in graph.layers),
        "parameter_bytes": sum(layer.parameter_bytes for layer in graph.layers),
    }


def _check_words(arguments: Sequence[str], overrides: Sequence[str], *, from_table: bool) -> None:
    """Refuse words that change nothing: runs of a table, and choices of a schedule or machine beside a measurement."""
    if from_table:
        idle, why = [item for item in arguments if item.startswith("num_runs=")], "a table of costs is not measured"
    else:
        idle = [item for item in overrides if key_of(item).partition(".")[0] not in MEASURED]
        why = "layers are measured one by one on this machine; cost=NAME takes their times from a table"
    if idle:
        raise ConfigError(f"{idle[0]} with profile: {why}; leave it out")


def _measured(request: Request, num_runs: int) -> LayerGraph:
    from rpbench.engine.measure.profiles import profile_layers  # torch, which a table does not need
    from rpbench.engine.workload import synthetic
    from rpbench.run.training.tensors import DTYPES, check_host_memory

    model = _model(request)
    check_host_memory(model, DTYPES[request.dtype])
    workload = synthetic(model, request.workload.microbatch_sequences, request.dtype, request.seed, num_microbatches=1)
    return profile_layers(workload, num_runs=num_runs, on_run=_Progress(model.name))


class _Progress:
    """Prints to stderr how many runs are over, at most once a second."""

    def __init__(self, name: str) -> None:
        self.name, self.said = name, time.monotonic()
        print(f"profile {name}: measuring", file=sys.stderr)

    def __call__(self, num_over: int) -> None:
        if time.monotonic() - self.said >= 1:
            self.said = time.monotonic()
            print(f"profile {self.name}: {num_over} runs are over", file=sys.stderr)


def _from_table(request: Request) -> LayerGraph:
    """Embedding (without a time in tables), layers and head; no recomputation, which PipeDream does not have."""
    model, times = _model(request), pose(request).times
    sizes = model_bytes(model, request.workload.microbatch_sequences * model.seq_len)
    ms = 1000 / times.units_per_second
    forward = [0, *times.forward, times.head_forward]
    backward = [0, *times.backward, times.head_backward]
    weights = [sizes.embedding, *sizes.layers, sizes.head]
    operators = ["Embedding", *["DecoderLayer"] * sizes.num_layers, "Head"]
    outputs = [sizes.boundary] * (len(weights) - 1) + [LOSS_BYTES]
    return chain(
        [
            Layer(f"node{number}", operator, float(ahead * ms), float(back * ms), output, size.gradients)
            for number, (operator, ahead, back, output, size) in enumerate(
                zip(operators, forward, backward, outputs, weights, strict=True), start=1
            )
        ]
    )


def _model(request: Request) -> Architecture:
    if request.model is None:
        raise ConfigError("model=abstract has no layers to profile; take one with a shape, such as model=tiny_gpt")
    return request.model
