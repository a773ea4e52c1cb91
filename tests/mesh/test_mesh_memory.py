"""Memory: Korthikanti's formulas and models, states by what is shared, activations in flight by the order itself."""

import math
from dataclasses import replace
from functools import partial
from itertools import product

import pytest

from rpbench.cost.hardware.machine import machine
from rpbench.ir.action import Kind
from rpbench.ir.schedule import Shape
from rpbench.mesh.job import Job, stage_seconds
from rpbench.mesh.layer_bytes import layer_bytes
from rpbench.mesh.layers.layer_seconds import padded_vocab
from rpbench.mesh.layout import Mesh, Sharing
from rpbench.mesh.memory import bytes_of_ranks, fitted, fullest
from rpbench.mesh.plan_search.search import memory_and_terms
from rpbench.mesh.software import declared_software
from rpbench.registry import entry
from rpbench.workload.architecture import Architecture, architecture
from tests.mesh import jobs

PLAIN = declared_software("megatron_core")
UNFUSED = replace(PLAIN, attention="unfused")

# Models of table 3: hidden, layers, heads, sequences of a microbatch; 2048 tokens, tensor parallelism 8.
KORTHIKANTI = {
    "22B": (6144, 48, 64, 4),
    "175B": (12288, 96, 96, 1),
    "530B": (20480, 105, 128, 1),
    "1T": (25600, 128, 160, 1),
}


def job(own, mesh, *, software=PLAIN, **options):
    options = {"seq_len": 2048, "num_microbatches": 8, **options}
    return Job(own, machine("dgx_a100").with_devices(mesh.num_devices), mesh, software, **options)


def gpt(hidden, layers, heads):
    return Architecture("gpt", layers, hidden, heads, 51200, gated=False, dropout=0.1)


@pytest.mark.parametrize("name", KORTHIKANTI)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_activations_of_a_layer_are_those_of_korthikanti(name, sequence_parallel):
    """s b h (10 + 24 / t + 5 a s / (h t)), or (34 + 5 a s / h) / t (arXiv 2205.05198, equations 2 and 4)."""
    h, layers, a, b = KORTHIKANTI[name]
    s, t = 2048, 8
    found = job(gpt(h, layers, a), Mesh(tensor=t, sequence_parallel=sequence_parallel), software=UNFUSED, sequences=b)
    whole = s * b * h * ((34 + 5 * a * s / h) / t if sequence_parallel else 10 + 24 / t + 5 * a * s / (h * t))
    assert layer_bytes(found, found.architecture.layers[0]) == pytest.approx(whole, rel=0.05)


def test_selective_recomputation_drops_the_scores():
    h, layers, a, _b = KORTHIKANTI["175B"]
    found = job(gpt(h, layers, a), Mesh(tensor=8, sequence_parallel=True), software=UNFUSED, recompute="selective")
    assert layer_bytes(found, found.architecture.layers[0]) == pytest.approx(2048 * h * 34 / 8, rel=0.05)


@pytest.mark.parametrize(
    "what, weights, gradients, optimizer",
    [
        ("none", 2, 4, 12),
        ("optimizer", 2, 4, 12 / 8),
        ("gradients", 2, 4 / 8, 12 / 8),
        ("parameters", 2 / 8, 4 / 8, 12 / 8),
    ],
)
def test_states_by_what_is_shared(what, weights, gradients, optimizer):
    """Rajbhandari et al., SC'20, figure 1, with gradients summed in fp32."""
    own = replace(architecture("llama3_8b"), vocab=128256)
    found = bytes_of_ranks(job(own, Mesh(data=8, sharing=Sharing(what))))[0]
    parameters = own.total_parameters
    for name, each in (("weights", weights), ("gradients", gradients), ("optimizer state", optimizer)):
        assert found[name] == pytest.approx(each * parameters, rel=1e-3)


def test_everything_shared_adds_up_to_the_whole_model():
    own = architecture("qwen3_30b_a3b")
    mesh = Mesh(data=8, expert=8, sharing=Sharing("parameters"))
    found = job(own, mesh)
    held = 8 * bytes_of_ranks(found)[0]["weights"]
    assert held == pytest.approx(2 * own.total_parameters, rel=0.01)


@pytest.mark.parametrize("tensor, pipeline", list(product([1, 2, 4], [1, 2, 4])))
def test_cuts_conserve_the_parameters(tensor, pipeline):
    own = replace(architecture("llama3_8b"), vocab=131072)
    found = job(own, Mesh(pipeline=pipeline, tensor=tensor, sharing=Sharing("none")))
    held = tensor * sum(bytes_of_ranks(found)[rank]["weights"] for rank in range(pipeline))
    assert held == pytest.approx(2 * own.total_parameters, rel=1e-3)


@pytest.mark.parametrize(
    "name, chunks, num, in_flight",
    [
        ("1f1b", 1, 8, 4),
        ("1f1b", 1, 40, 4),
        ("gpipe", 1, 8, 8),
        ("gpipe", 1, 40, 40),
        ("zb_h2", 1, 8, 7),
        ("interleaved_1f1b", 2, 8, 5.5),
    ],
)
def test_activations_in_flight_come_from_the_order(name, chunks, num, in_flight):
    """Rank 0 of 4: p; all m, in a long step too; 2 p - 1; (v p + p - 1) chunks of 1 / v."""
    own = replace(architecture("llama3_8b"), num_layers=32)
    found = job(own, Mesh(pipeline=4, sharing=Sharing("none")), schedule=name, chunks=chunks, num_microbatches=num)
    of_rank = 8 * layer_bytes(found, own.layers[0])
    assert bytes_of_ranks(found)[0]["activations"] == pytest.approx(in_flight * of_rank)


@pytest.mark.parametrize("tensor", [2, 4, 8])
def test_sequence_parallelism_never_needs_more(tensor):
    own = architecture("llama3_8b")
    plain, cut = (
        sum(bytes_of_ranks(job(own, Mesh(tensor=tensor, sequence_parallel=sp)))[0].values()) for sp in (False, True)
    )
    assert cut < plain


def test_a_verdict_says_what_is_largest():
    small, large = (
        fullest(job(architecture(name), Mesh(tensor=8, sequence_parallel=True))).verdict()
        for name in ("llama3_8b", "llama31_405b")
    )
    assert small.answer == "ok"
    assert large.answer == "oom"
    assert "the most is optimizer" in large.reason


@pytest.mark.parametrize("name", ["zb_h1", "zb_h2", "two_bp"])
def test_what_the_gradient_of_the_weights_still_needs_stays_between_the_halves(name):
    """55 % of a microbatch's activations wait for W behind I, and 2 bytes of a logit: counted over the row."""
    ranks, microbatches = 3, 6
    own = replace(gpt(1024, 6, 16), dropout=0.0)
    found = job(own, Mesh(pipeline=ranks, sharing=Sharing("none")), schedule=name, num_microbatches=microbatches)
    schedule = entry(name).build(Shape(ranks, ranks, microbatches))
    of_stage = 2 * layer_bytes(found, own.layers[0])
    num_logits = found.microbatch_tokens * padded_vocab(found)
    for rank in range(ranks):
        begun, halved, most = 0, 0, 0.0
        for action in schedule.compute(rank):
            begun += (action.kind is Kind.F) - (action.kind in (Kind.B, Kind.I))
            halved += (action.kind is Kind.I) - (action.kind is Kind.W)
            if action.kind is Kind.F:
                logits = (found.software.logit_bytes * begun + 2 * halved) * num_logits * (rank == ranks - 1)
                most = max(most, (begun + 0.55 * halved) * of_stage + logits)
        assert bytes_of_ranks(found)[rank]["activations"] == pytest.approx(most)


@pytest.mark.parametrize("more, answer", [(-1, True), (0, True), (1, False)])
def test_what_fills_a_device_to_the_last_byte_fits(more, answer):
    found = job(gpt(1024, 8, 16), Mesh(pipeline=2))
    kept_back = found.machine.reserved_memory_bytes or 0
    need = found.machine.device.memory_bytes - kept_back + more
    assert (fullest(found, [{"weights": need / found.software.scale}]).lacks == 0) is answer


@pytest.mark.parametrize("cut", [(5,), (4, 5), (-1, 9)])
def test_a_cut_that_is_not_of_all_layers_is_refused(cut):
    """Too few stages, a layer too many, and less than no layer."""
    with pytest.raises(ValueError, match="2 numbers that add up to 8 layers"):
        job(gpt(1024, 8, 16), Mesh(pipeline=2), cut=cut)


def test_a_device_holds_tensors_with_their_fragments_and_what_its_machine_keeps_back():
    found = job(gpt(1024, 8, 16), Mesh())
    found = replace(found, software=replace(found.software, scale=1.5))
    for kept_back in (None, 1000):
        on = replace(found, machine=replace(found.machine, reserved_memory_bytes=kept_back))
        assert fullest(on, [{"weights": 600.0, "gradients": 400.0}]).needed == 1500 + (kept_back or 0)


@pytest.mark.parametrize(
    "mesh, schedule, chunks",
    [
        (Mesh(data=8, sharing=Sharing("parameters")), "1f1b", 1),
        (Mesh(data=2, pipeline=2, tensor=2, sequence_parallel=True, sharing=Sharing("optimizer")), "1f1b", 1),
        (Mesh(pipeline=4), "interleaved_1f1b", 2),
    ],
)
def test_as_few_layers_are_recomputed_as_the_memory_allows(mesh, schedule, chunks):
    """Between all and none: the time of fewer recomputed layers, and one more of any stage that keeps would not fit."""
    sized = partial(jobs.job, mesh, schedule=schedule, chunks=chunks, num_microbatches=16)
    needed = [fullest(sized(recompute=word, sequences=2)).needed for word in ("full", "none")]
    between = sized(recompute="fitting", sequences=2)
    for part, some in ((0.6, True), (1.01, False), (-0.1, False)):
        room = needed[0] + part * (needed[1] - needed[0])
        found = fitted(replace(between, machine=replace(between.machine, device_memory_bytes=round(room))))
        layers = len(found.architecture.layers)
        kept = len(found.kept)
        assert kept == (0 if part < 0 else layers) if not some else 0 < kept < layers
        seconds = {word: sum(stage_seconds(replace(found, recompute=word)).recompute) for word in ("full", "none")}
        assert sum(stage_seconds(found).recompute) == pytest.approx((1 - kept / layers) * seconds["full"])
        assert seconds["none"] == 0
        assert bool(fullest(found).lacks) == (part < 0)
        more = sorted({*range(layers)} - {*found.kept}) if some else ()
        assert all(fullest(replace(found, kept=tuple(sorted({*found.kept, layer})))).lacks for layer in more)


@pytest.mark.parametrize("schedule, chunks", [("1f1b", 1), ("gpipe", 1), ("zb_h1", 1), ("zb_h2", 1), ("zb_v", 2)])
@pytest.mark.parametrize("part", [0.0, 0.001, 0.02, 0.1])
def test_where_everything_recomputed_fits_as_little_recomputed_as_fits_does_too(schedule, chunks, part):
    """Some stages keep some layers there, and the others hold what they hold where all is recomputed."""
    found = jobs.job(Mesh(tensor=2, pipeline=4), schedule=schedule, chunks=chunks, num_microbatches=16)
    least, most = (memory_and_terms(replace(found, recompute=word))[1].needed for word in ("full", "none"))
    on = replace(found.machine, device_memory_bytes=math.ceil(least + part * (most - least)))
    assert not memory_and_terms(replace(found, recompute="fitting", machine=on))[1].lacks
