"""Megatron's layout of a pipeline: its letters by hand, what it cannot hold, and what its order is not."""

import pytest
from torch_cases import schedule_near

from rpbench.ir.partition import Partition, parse
from rpbench.ir.schedule import ScheduleError
from rpbench.torch_runtime.formats.export import Given, export
from rpbench.torch_runtime.formats.frameworks import numbers_of
from rpbench.torch_runtime.formats.megatron import megatron_layout, megatron_options, megatron_virtual_stages


def written(name, ranks=2, microbatches=4, options=None, **known):
    order = schedule_near(name, ranks, microbatches)
    plan = numbers_of(order, options, **({"recompute": "none"} | known))
    return export(order, "megatron_layout", Given(lambda: None, plan=plan))


def words_of(text):
    """Arguments as a shell gives them, what stands in comments left out."""
    return [word for line in text.splitlines() if line.startswith("--") for word in line.split(" ")]


@pytest.mark.parametrize(
    "cut, ranks, layout, virtual",
    [
        ("3-5", 2, "Et*3|t*5L", None),
        ("2-1-3-2", 2, "Ett|t|t*3|ttL", None),
        ("0-4-0", 3, "E|t*4|L", None),
        ("2-2-2-2", 2, "Ett|tt|tt|ttL", 2),
    ],
)
def test_megatrons_layout_by_hand(cut, ranks, layout, virtual):
    """Letters and counts as Megatron's documentation has them: E and L once, as many t as layers."""
    options = megatron_options(parse(cut), ranks)
    assert options["pipeline-model-parallel-layout"] == layout == megatron_layout(parse(cut))
    assert options["pipeline-model-parallel-size"] == ranks
    equal = megatron_virtual_stages(parse(cut), ranks)
    assert (equal and equal["num-virtual-stages-per-pipeline-rank"]) == virtual
    assert equal is None or "pipeline-model-parallel-layout" not in equal  # Megatron takes one of the two


def test_megatron_takes_loops_only():
    with pytest.raises(ValueError, match="3 stages on 2 ranks"):
        megatron_options(parse("1-1-1"), 2)
    with pytest.raises(ValueError, match="V and wave placements have no layout"):
        written("zb_v")
    with pytest.raises(ValueError, match="cuts forward and backward apart"):
        megatron_layout(Partition((2, 2), (1, 1, 2)))


@pytest.mark.parametrize(
    ("name", "runs"),
    [("1f1b", True), ("interleaved_1f1b", True), ("combined_1f1b", True), ("zb_h1", False), ("gpipe", False)],
)
def test_megatrons_options_say_if_the_order_is_another(name, runs):
    assert written(name, data=2, expert=2).startswith(f"# Megatron does not run {name}: ") != runs


def test_megatron_reads_its_layout():
    layouts = pytest.importorskip("megatron.core.transformer.pipeline_parallel_layer_layout")
    for cut, ranks in (("3-5", 2), ("2-1-3-2", 2), ("1-2-3-1-1-1", 3)):
        found = layouts.PipelineParallelLayerLayout.from_str(megatron_layout(parse(cut)), ranks)
        counts = [
            sum(part.name == "decoder" for part in found.layout[rank][chunk])
            for chunk in range(len(found.layout[0]))
            for rank in range(ranks)
        ]
        assert counts == list(parse(cut).forward)
        found.validate_layer_layout(num_layers=parse(cut).num_layers, mtp_num_layers=0)


def test_a_group_of_microbatches_is_told_where_it_is_not_one_a_rank():
    """Megatron refuses a rest smaller than its group of one microbatch a rank; our order has groups of one size."""
    option = "--microbatch-group-size-per-virtual-pipeline-stage"
    for microbatches, group in ((8, None), (6, "6"), (10, "5"), (15, "5")):
        words = words_of(written("interleaved_1f1b", 4, microbatches))
        assert (words[words.index(option) + 1] if option in words else None) == group
    with pytest.raises(ValueError, match="3 microbatches on 4 ranks with several stages each: Megatron takes at least"):
        written("interleaved_1f1b", 4, 3)


@pytest.mark.parametrize(
    "known, told",
    [
        ({}, []),  # no replicas
        ({"data": 2}, ["--overlap-grad-reduce"]),
        ({"data": 2, "shared": "optimizer"}, ["--overlap-grad-reduce", "--overlap-param-gather"]),
        ({"data": 2, "shared": "optimizer", "parameters_beside": False}, ["--overlap-grad-reduce"]),
        ({"data": 2, "shared": "optimizer", "gradients_beside": False}, []),
    ],
)
def test_exchanges_beside_computation_are_asked_for(known, told):
    """Megatron has them behind it if nothing is said, and parameters only with gradients."""
    assert [word for word in words_of(written("1f1b", **known)) if "overlap" in word] == told


def test_passes_are_paired_only_where_megatron_pairs_them():
    assert "--overlap-moe-expert-parallel-comm" in written("combined_1f1b", data=2, expert=2)
    for known in ({}, {"data": 2, "expert": 2, "recompute": "full"}):
        with pytest.raises(ValueError, match="Megatron pairs passes only where experts are dealt over devices"):
            written("combined_1f1b", **known)


def test_experts_beside_tensor_shards_want_sequence_parallelism():
    known = {"tensor": 2, "data": 2, "expert": 2, "expert_tensor": 1}
    with pytest.raises(ValueError, match="tensor=2 with experts: Megatron trains them with sequence parallelism alone"):
        written("1f1b", **known)
    assert "--sequence-parallel" in written("1f1b", **known, sequence_parallel=True)


@pytest.mark.parametrize("name", ["zero_offload", "zenflow", "zero_infinity", "superoffload"])
@pytest.mark.parametrize("form", ["megatron_layout", "torchtitan", "fsdp2"])
def test_what_lives_on_the_host_is_not_written_for_who_keeps_it_on_devices(name, form):
    order = schedule_near(name, 2, 4)
    if name == "zero_infinity" and form != "megatron_layout":  # all on the host, which FSDP2 has too, but no SSDs
        assert export(order, form, Given(lambda: None))
        plan, place = numbers_of(order, {"ssd": "optimizer"}), "parameters on SSDs"
    else:
        plan, place = numbers_of(order), "on the host"
    with pytest.raises(ScheduleError, match=f"schedule={name}: .*{place}, which format={form} cannot say"):
        export(order, form, Given(lambda: None, plan=plan))


# --- read by Megatron's own parser, where it is installed ---------------------------------------------------------

SIZES = "--hidden-size 64 --num-attention-heads 4 --max-position-embeddings 64 --vocab-size 128 --mock-data"
LOCAL = "--tokenizer-type NullTokenizer --transformer-impl local --no-persist-layer-norm --train-iters 1 --lr 1e-4"
EXPERTS = "--num-experts 4 --moe-token-dispatcher-type alltoall"


@pytest.mark.parametrize(
    "name, known",
    [
        ("1f1b", {"data": 2, "shared": "optimizer", "recompute": "full"}),
        ("1f1b", {"data": 2, "shared": "gradients", "tensor": 2, "sequence_parallel": True}),
        ("interleaved_1f1b", {"recompute": "full", "recomputed_layers": 1}),
        ("combined_1f1b", {"data": 2, "expert": 2, "expert_tensor": 1}),
        ("zero_3", {"recompute": "selective"}),
        ("zero_2", {"options": {"reduce_each_microbatch": False}}),
        ("data_parallel", {"tensor": 2, "context": 2}),
    ],
)
def test_megatrons_own_parser_takes_the_arguments(name, known, monkeypatch):
    """With its checks, which raise where sizes or options contradict each other."""
    arguments = pytest.importorskip("megatron.training.arguments")
    known = {"sequences": 3, "seq_len": 64} | known
    options = known.pop("options", None)
    plan = numbers_of(schedule_near(name, 2, 4), options, **({"recompute": "none"} | known))
    text = written(name, options=options, **known)
    words = [*words_of(text), *f"{SIZES} {LOCAL} {EXPERTS if plan.expert > 1 else ''}".split()]
    monkeypatch.setattr("sys.argv", ["pretrain", *words])
    monkeypatch.setattr(arguments, "get_device_arch_version", lambda: 9)
    monkeypatch.setenv("WORLD_SIZE", str(plan.data * plan.pipeline * plan.tensor * plan.context))
    if "CUDA_DEVICE_MAX_CONNECTIONS=1" in text:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    found = arguments.validate_args(arguments.parse_args())
    assert (found.micro_batch_size, found.global_batch_size, found.seq_length) == (3, plan.global_batch, 64)
    assert (found.data_parallel_size, found.expert_model_parallel_size) == (plan.data, plan.expert)
    assert (str(found.params_dtype), found.recompute_granularity or "none") == ("torch.bfloat16", plan.recompute)
    assert found.use_distributed_optimizer is bool(plan.stage)
    assert found.use_megatron_fsdp is (plan.stage > 1)
    assert arguments.core_transformer_config_from_args(found).pipeline_model_parallel_size == plan.pipeline
