"""The profiler: every module in its order, what it weighs, and times that follow the work."""

import pytest
import torch

from rpbench.engine.measure.profiles import profile_layers
from rpbench.engine.workload import Workload
from rpbench.models.build import build_model
from rpbench.models.data import SyntheticTokens
from rpbench.workload.architecture import Architecture

MODEL = Architecture("small", num_layers=2, hidden=64, heads=2, vocab=50, seq_len=32, gated=False)


def workload_of(model: Architecture, dtype: torch.dtype = torch.float32) -> Workload:
    data = SyntheticTokens(model.vocab, model.seq_len, 2)
    return Workload(list(build_model(model, dtype=dtype)), data, 1)


def test_layers_come_in_order_with_what_they_weigh():
    graph = profile_layers(workload_of(MODEL), num_warmups=0, num_runs=1)
    assert [layer.operator for layer in graph.layers] == ["Embedding", "DecoderLayer", "DecoderLayer", "Head"]
    assert graph.edges == (("node1", "node2"), ("node2", "node3"), ("node3", "node4"))
    assert [layer.parameter_bytes for layer in graph.layers] == [
        4 * MODEL.embedding_parameters,
        *[4 * MODEL.layer_parameters] * 2,
        4 * MODEL.head_parameters,
    ]
    assert [layer.activation_bytes for layer in graph.layers] == [4 * 2 * 32 * 64] * 3 + [4]
    assert all(layer.forward_ms > 0 and layer.backward_ms > 0 for layer in graph.layers)


def test_half_the_precision_is_half_the_bytes_and_frozen_weights_do_not_count():
    model = Architecture("lora", 1, 64, 2, 50, seq_len=32, gated=False, training_mode="lora", lora_rank=4)
    embedding, layer, head = profile_layers(workload_of(model, torch.bfloat16), num_runs=1, num_warmups=0).layers
    assert (embedding.parameter_bytes, head.parameter_bytes) == (0, 0)
    assert layer.parameter_bytes == 2 * model.trainable_layer_parameters
    assert layer.activation_bytes == 2 * 2 * 32 * 64


def test_the_median_is_taken_of_the_runs_behind_the_warmup(monkeypatch):
    """CPU time as if it were read from a clock of our own: the first run takes 100 s a step, then 1, 7 and 2."""
    now, steps, readings = [0.0], iter([100.0] * 8 + [1.0] * 8 + [7.0] * 8 + [2.0] * 8), [0]

    def thread_time() -> float:
        readings[0] += 1
        if readings[0] % 2 == 0:  # began is the first reading, the second ends what it times
            now[0] += next(steps)
        return now[0]

    monkeypatch.setattr("rpbench.engine.measure.profiles.time.thread_time", thread_time)
    over: list[int] = []
    graph = profile_layers(workload_of(MODEL), num_warmups=1, num_runs=3, on_run=over.append)
    assert {layer.forward_ms for layer in graph.layers} == {layer.backward_ms for layer in graph.layers} == {2000.0}
    assert over == [1, 2, 3, 4]


def test_no_run_is_no_profile():
    with pytest.raises(ValueError, match="at least 1 run is counted"):
        profile_layers(workload_of(MODEL), num_runs=0)
