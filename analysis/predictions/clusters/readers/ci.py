"""Rows of Megatron-LM's CI cases: peak bytes of the last pipeline rank.

What is no column takes Megatron's default: inner width 4 h (8/3 h with a gate), the tokenizer's vocabulary by family,
expert tensor size equal to the tensor size.
"""

from dataclasses import replace
from functools import cache

from analysis.predictions.clusters.case import Case, Row, machine_of, number, refused, rows_of, software_of, whole
from rpbench.mesh.job import Job
from rpbench.mesh.layer_seconds import Precision, Recompute
from rpbench.mesh.layout import Mesh, Sharded, Sharing
from rpbench.mesh.software import Software
from rpbench.workload.architecture import Architecture
from rpbench.workload.parts import Experts, Latent

FAMILIES = ("gpt", "moe", "mixtral", "bert", "nemotron")
VOCABULARY = {"gpt": 50257, "moe": 50257, "mixtral": 32000, "bert": 30522, "nemotron": 256_000}
LARGE_VOCABULARY = {"gpt3_15b": 256_000, "gpt3_7b": 131_072}
ASKS = ("memory",)
RELEASE_NODES = 8  # of cases with release-sized models whose row names no nodes; assumed, met by the given rows
OLD_STACK = "dracooci"  # golden values of this name keep the scores: pairs of given rows
WORKSPACE = {"a100": 0.0, "h100": 75e6, "gb200": 75e6}  # of cuBLAS on Hopper and later: pairs of given rows
DEVICES = {"a100": "dgx_a100", "h100": "dgx_h100", "gb200": "gb200_nvl72"}


def ci(row: Row) -> list[Case]:
    """A CI case as a job, or why it is none."""
    reason = _unmodelled(row)
    if reason:
        return refused(row, reason, ASKS)
    try:
        job = _job(row)
    except ValueError as error:
        return refused(row, f"its columns make no whole configuration: {error}", ASKS)
    return [
        Case(
            row["id"],
            job,
            None,
            number(row.get("max_alloc_bytes")),
            memory_rank=-1,
            configuration=row["test_case"],
            asks=ASKS,
        )
    ]


def _unmodelled(row: Row) -> str:
    family, name = row["model_family"], row["test_case"]
    if family not in FAMILIES:
        return f"{family}: an encoder, a hybrid or several models, which are not modelled"
    if not (row["num_layers"] and row["hidden_size"] and row["num_attention_heads"] and row["micro_batch_size"]):
        return "the sizes of the model are not in the file"
    if row["pipeline_model_parallel_layout"]:
        return "prediction layers and the inner width of experts are not in the file"
    if "grpo" in name or "rl" in row["model_family"]:
        return "reinforcement learning keeps more than one model"
    if whole(row["num_experts"], 0) > 8:
        return "the inner width of small experts is not in the file"
    if row["fine_grained_activation_offloading"] == "True" or row["cpu_offloading_num_layers"]:
        return "activations go to the host by rules that are not in the file"
    return ""


def _job(row: Row) -> Job:
    tensor, pipeline = whole(row["tensor_model_parallel_size"]), whole(row["pipeline_model_parallel_size"])
    context, sequences = whole(row["context_parallel_size"]), int(row["micro_batch_size"])
    nodes = whole(row["nodes"], RELEASE_NODES if int(row["hidden_size"]) >= 4096 else 1)
    gpus = nodes * whole(row["gpus_per_node"], 4 if row["platform"] == "gb200" else 8)
    data = max(1, gpus // (tensor * pipeline * context))
    experts = whole(row["expert_model_parallel_size"]) if row["num_experts"] else 1
    expert_tensor = whole(row["expert_tensor_parallel_size"], tensor) if row["num_experts"] else 1
    data = max(data, -(-experts * expert_tensor // (tensor * context)))
    layers, chunks = int(row["num_layers"]), 1
    if row["num_layers_per_virtual_pipeline_stage"] and pipeline > 1:
        chunks = layers // pipeline // int(row["num_layers_per_virtual_pipeline_stage"])
    elif row["num_virtual_stages_per_pipeline_rank"] and pipeline > 1:
        chunks = int(row["num_virtual_stages_per_pipeline_rank"])
    batch = whole(row["global_batch_size"], 32)
    microbatches = max(1, batch // (data * sequences))
    if chunks > 1:
        microbatches = max(pipeline, microbatches // pipeline * pipeline)
    machine = machine_of(DEVICES[row["platform"]], tensor * pipeline * context * data)
    return Job(
        _architecture(row),
        machine,
        Mesh(
            data,
            pipeline,
            tensor,
            context,
            experts,
            expert_tensor,
            sequence_parallel=row["sequence_parallel"] == "True" and tensor > 1,
            sharing=Sharing(_shared(row), data * context // 2 if _instances(row, data * context) else 0),
        ),
        _software(row),
        whole(row["seq_length"], 1024),
        sequences,
        microbatches,
        schedule="interleaved_1f1b" if chunks > 1 else "1f1b",
        chunks=chunks,
        recompute=_recompute(row),
        precision=_precision(row),
    )


def _instances(row: Row, replicas: int) -> bool:
    """Whether two instances of the distributed optimizer share the replicas."""
    return "multi_dist_optimizer_instances" in row["test_case"] and replicas % 2 == 0


def _shared(row: Row) -> Sharded:
    if row["data_parallel_sharding_strategy"] == "optim_grads_params":
        return "parameters"
    return "optimizer" if row["use_distributed_optimizer"] == "True" else "none"


def _recompute(row: Row) -> Recompute:
    given = row["recompute_granularity"]
    return "full" if given == "full" else "selective" if given == "selective" else "none"


def _precision(row: Row) -> Precision:
    return "fp8" if row["fp8_format"] else "bf16"


def _software(row: Row) -> Software:
    found = software_of("megatron_ci")
    backend = row["attention_backend"]
    unfused = backend in ("unfused", "local") or row["transformer_impl"] == "local"
    unfused |= not backend and row["environment"] == "lts" and _keeps_scores(row)
    found = replace(found, attention="unfused" if unfused else "flash2", reserve_bytes=WORKSPACE[row["platform"]])
    if int(row["hidden_size"]) >= 4096:
        found = found.with_constants({"imbalance": 1.0})
    if "muon" in row["test_case"]:
        found = replace(found, optimizer_bytes=8.0)
    if row["fp16"] == "True" and row["bf16"] != "True":
        found = replace(found, accumulate_bytes=2, gradient_bytes=2)
    return found


def _keeps_scores(row: Row) -> bool:
    """Whether the older container's attention kept its scores, as pairs of given rows show.

    It did where the golden values have the name of the older machines, or where a case has no older values beside them.
    """
    if OLD_STACK in row["golden"]:
        return True
    return row["golden"] == "golden_values_lts_dgx_a100.json" and row["test_case"] not in _with_older_values()


@cache
def _with_older_values() -> frozenset[str]:
    """Cases that have golden values of the older container from before machines were named, given or asked."""
    rows = (*rows_of("measured", "megatron_ci_golden"), *rows_of("challenge", "megatron_ci_golden"))
    return frozenset(row["test_case"] for row in rows if row["golden"] == "golden_values_lts.json")


def _architecture(row: Row) -> Architecture:
    family, gated = row["model_family"], row["swiglu"] == "True"
    hidden, name = int(row["hidden_size"]), row["test_case"]
    inner = whole(row["ffn_hidden_size"], 0) or (round(8 * hidden / 3 / 64) * 64 if gated else 4 * hidden)
    vocab = next((size for start, size in LARGE_VOCABULARY.items() if name.startswith(start)), VOCABULARY[family])
    experts = Experts(int(row["num_experts"]), whole(row["moe_router_topk"], 2), inner) if row["num_experts"] else None
    old = family in ("gpt", "moe", "bert") and hidden <= 1024
    return Architecture(
        name,
        int(row["num_layers"]),
        hidden,
        int(row["num_attention_heads"]),
        whole(row["vocab_size"], vocab),
        whole(row["num_query_groups"], 8)
        if row["group_query_attention"] == "True"
        else int(row["num_attention_heads"]),
        inner=inner,
        gated=gated,
        tied=row["untie_embeddings_and_output_weights"] != "True",
        experts=experts,
        latent=Latent(0, 512, 128, 64, 128) if "mla" in name else None,
        learned_positions=whole(row["seq_length"], 1024) if old else 0,
        dropout=0.1 if old else 0.0,
        biases=True,
    )
