"""Keys that a run would not read: they are refused, or a note says that they change nothing."""

import pytest

from rpbench.config.choices import ConfigError
from rpbench.config.loading import load

CLUSTER, MODEL = "cluster=8x_rtx4090", "model=qwen3_1p7b"
ANALYTIC = ("schedule=1f1b", MODEL, CLUSTER, "cost=analytic")
CONSTANT = ("schedule=1f1b", MODEL, CLUSTER, "cost=constant")
PREDICTED = ("mode=predict", "schedule=roundpipe", MODEL, CLUSTER, "cost=analytic")
TRAINED = ("schedule=1f1b", "backend=virtual", "model=tiny_gpt", "num_devices=2", "num_microbatches=4")
MESHED = ("schedule=1f1b", "model=llama3_8b", "cluster=dgx_h100", "num_devices=32", "mesh.data=4", "mesh.tensor=2")


@pytest.mark.parametrize(
    ("words", "key", "said"),
    [
        (ANALYTIC, "+cost.forward_ms=2", "cost.forward_ms=2.0 with cost=analytic: a key of cost=constant"),
        (ANALYTIC, "+cost.split_backward=true", "a key of cost=published and profiled"),
        (MESHED, "+cost.hop_ms=1", "cost.hop_ms=1.0 with cost=analytic"),  # the cost of a mesh by default
        (MESHED, "+cost.split_penalty=1.5", "cost.split_penalty=1.5 under a mesh"),  # was dropped with the default
        (("schedule=1f1b",), "+cost.profile=times.json", "a key of cost=profiled"),
        (ANALYTIC, "+cost.constants.adam_byte=3", "unknown constant of cost 'adam_byte'; did you mean adam_bytes?"),
        (CONSTANT, "mesh.precision=fp8", "mesh.precision=fp8 with cost=constant on cluster=8x_rtx4090: given times"),
        ((*ANALYTIC, "num_devices=16"), "mesh.data=2", "num_devices=16: cluster 8x_rtx4090 has 8; ask for fewer"),
        (TRAINED, "+backend.data_parallel=2", "backend.data_parallel=2 with backend=virtual: a key of backend=torch"),
        (TRAINED, "+backend.time_scale=2", "a key of backend=emulated"),
        (ANALYTIC, "cluster.root_complex_bytes_per_s=1e9", "cluster.devices_per_root_complex=None with cluster.root"),
    ],
)
def test_keys_that_nothing_would_read_are_refused(words, key, said):
    with pytest.raises((ConfigError, ValueError)) as error:
        load((*words, key))
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("words", "key", "why"),
    [
        (("schedule=1f1b",), "cluster.copy_bytes_per_s=1e8", "cost=unit has its own seconds, and charge=hops"),
        (("schedule=1f1b",), "cluster.device_memory_bytes=9000", "model=abstract has no bytes"),
        (("schedule=1f1b",), "workload.microbatch_sequences=2", "model=abstract has no sequences"),
        (("schedule=1f1b",), "recompute=none", "recomputation takes no time here"),
        (("schedule=1f1b",), "seed=3", "mode=simulate has no tensors"),
        (("schedule=1f1b",), "+workload.text=prose", "mode=simulate has no tensors"),
        (("schedule=1f1b",), "+cost.constants.adam_bytes=3", "these constants are of kernels"),
        (CONSTANT, "cluster.matmul_flops_per_s=1e13", "cost=constant has its own seconds"),
        (ANALYTIC, "prefetch=2", "no weights are streamed"),
        (ANALYTIC, "cluster.ssd=2x_samsung_990_pro_4tb", "schedule=1f1b keeps nothing on SSDs"),
        (ANALYTIC, "cluster.inter_bytes_per_s=1e7", "the run has one host"),
        (ANALYTIC, "cluster.price_usd_per_hour=9", "rent is counted by rpbench advise"),
        (ANALYTIC, "cluster.host_to_device_bytes_per_s=64e9", "copies reach cluster.copy_bytes_per_s=2.097e+10"),
        (ANALYTIC, "mesh.overlap.tensor=0.9", "mesh.tensor is 1"),
        (ANALYTIC, "mesh.order=[data,tensor,context,pipeline]", "a pipeline alone has one axis"),
        (MESHED, "mesh.overlap.expert=0.9", "mesh.expert is 1"),
        (MESHED, "mesh.reshard=false", "of mesh.shard=parameters over replicas alone"),
        (MESHED, "cluster.copy_bytes_per_s=1e8", "under a mesh nothing moves to hosts"),
        ((*ANALYTIC, "mode=failures"), "optimizer=sgd", "a simulated failure has no tensors"),
        (PREDICTED, "+cost.overlap_gain=0.3", "mode=predict times no actions"),
        (PREDICTED, "software=torchtitan", "mode=predict counts with the numbers of the system's own software"),
        (PREDICTED, "cluster.inter_bytes_per_s=1e7", "closed forms of a system on one host"),
        (TRAINED, "prefetch=2", "no weights are streamed"),
        (TRAINED, "+workload.held_out=0.1", "workload=synthetic has no text"),
        (TRAINED, "cluster.copy_bytes_per_s=1e8", "cost=unit has its own seconds, and charge=hops"),
        (("mode=roofline", MODEL, CLUSTER), "cluster.memory_bytes_per_s=1e9", "mode=roofline takes cluster.matmul"),
        (("mode=roofline", MODEL, CLUSTER), "cost=constant", "closed forms of a model and a machine"),
    ],
)
def test_keys_that_a_run_does_not_read_are_named_in_a_note(words, key, why):
    assert not [note for note in load(words).notes if "without effect" in note]
    (note,) = [note for note in load((*words, key)).notes if "without effect" in note]
    assert note.startswith(f"{key} without effect: ")
    assert why in note


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (("mode=roofline", MODEL, CLUSTER), "cluster.host_to_device_bytes_per_s=1e9"),
        (ANALYTIC, "cluster.copy_bytes_per_s=1e9"),
        (ANALYTIC, "mesh.precision=fp8"),
        ((*ANALYTIC, "mesh.data=2"), "cluster.copy_bytes_per_s=1e9"),  # without direct links, under a mesh too
        (("schedule=1f1b", MODEL, "cluster=4x_l40s", "cost=analytic"), "cluster.host_to_device_bytes_per_s=1e9"),
        (("schedule=greedysnake", *ANALYTIC[1:], "schedule.ssd=all"), "cluster.ssd=2x_samsung_990_pro_4tb"),
        (("schedule=1f1b", "model=tiny_gpt", "cost=profiled"), "dtype=float64"),  # measured with such tensors
        (PREDICTED, "+cost.constants.norm_bytes=80"),
    ],
)
def test_keys_that_a_run_reads_have_no_note(words, key):
    assert not [note for note in load((*words, key)).notes if "without effect" in note]
