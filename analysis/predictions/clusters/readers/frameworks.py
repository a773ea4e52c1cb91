"""Rows of FSDP's family and others: llm-foundry, InternEvo, torchtitan, AutoModel, SimuMax, Primus."""

from dataclasses import replace

from analysis.predictions.clusters.case import Case, Row, machine_of, number, refused, software_of, whole
from rpbench.mesh.job import Job
from rpbench.mesh.layer_seconds import Adapters, Precision, Recompute
from rpbench.mesh.layout import Axis, Mesh, Sharing
from rpbench.mesh.memory import fullest
from rpbench.workload.architecture import Architecture, architecture

GIB = 2**30
ASYNC_TENSOR = 0.5  # of a sum that AsyncTP hides: half, the gather or the scatter beside the product that it feeds


def llm_foundry(row: Row) -> list[Case]:
    """A row of llm-foundry's FSDP tables."""
    own = replace(architecture(row["model"].replace("-", "_")), learned_positions=int(row["seq"]))
    new = row["gpu"].startswith("h100")
    name = {"a100_40gb": "a100_40gb_roce", "a100_80gb": "dgx_a100", "h100_80gb": "dgx_h100"}[row["gpu"]]
    gpus = int(row["gpus"])
    job = Job(
        own,
        machine_of(name, gpus),
        Mesh(gpus, sharing=Sharing("parameters", reshard=row["sharding"] == "FULL_SHARD")),
        software_of(_foundry(row["precision"], new)),
        int(row["seq"]),
        int(row["micro_batch"]),
        int(row["grad_accum"]),
        recompute="full" if row["activation_checkpointing"] == "True" else "none",
        precision="fp8" if row["precision"] == "amp_fp8" else "bf16",
    )
    pace = number(row.get("tokens_per_s_per_gpu"))
    return [Case(row["id"], job, pace and job.tokens / pace / gpus, configuration=row["id"], note=row["precision"])]


def _foundry(precision: str, new: bool) -> str:
    """The software of a row: tables of pure bf16 are of an earlier version than those of mixed precision."""
    if new:
        return "llm_foundry_h100"
    return "llm_foundry_bf16" if precision == "bf16" else "llm_foundry"


def internevo(row: Row) -> list[Case]:
    """A row of InternEvo's tables."""
    own = architecture("internlm_20b" if row["model"] == "20B" else "internlm_7b")
    gpus, tensor, pipeline = int(row["gpus"]), int(row["tp"]), int(row["pp"])
    zero, data = int(row["zero1"]), gpus // (tensor * pipeline)
    fsdp = row["fsdp"] == "True"
    group = 0 if zero <= 0 or zero >= data else zero
    framework = software_of("internevo_memory" if row["table"].startswith("memory") else "internevo")
    job = Job(
        own,
        machine_of("a800_roce" if row["gpu"] == "A800" else "dgx_a100", gpus),
        Mesh(data, pipeline, tensor, order=_order(), sharing=Sharing("parameters" if fsdp else "optimizer", group)),
        framework,
        int(row["seq"]),
        int(row["micro_batch"]),
        int(row["micro_num"]),
        recompute="full" if row["activation_checkpointing"] == "yes" else "none",
    )
    pace, memory = number(row.get("tokens_per_s_per_gpu")), number(row.get("memory_GB"))
    asks = ("memory",) if row["table"].startswith("memory") else ("time",)
    time = pace and job.tokens / pace / gpus
    return [Case(row["id"], job, time, memory and memory * 1e9, configuration=row["id"], asks=asks)]


def _order() -> tuple[Axis, ...]:
    return ("tensor", "data", "context", "pipeline")


def torchtitan(row: Row) -> list[Case]:
    """A row of torchtitan's reports."""
    own = architecture(
        {"llama3.1-8b": "llama3_8b", "llama3.1-70b": "llama3_70b", "llama3.1-405b": "llama31_405b"}[row["model"]]
    )
    how, gpus = row["techniques"], int(row["gpus"])
    framework = software_of("torchtitan" if "compile" in how.lower() else "torchtitan_eager")
    if "async" in how.lower():
        framework = replace(framework, hidden_tensor=ASYNC_TENSOR)
    pipeline, local = int(row["pp"]), whole(row["local_batch"], 1)
    microbatches = whole(row["microbatches"], pipeline if pipeline > 1 else 1)
    interleaved = row["schedule"].startswith("Interleaved")
    recompute: Recompute = "full" if row["ac"] == "full" else "per_op"
    rowwise = "rowwise" in how
    precision: Precision = "fp8" if "float8" in how.lower() and not rowwise else "bf16"
    mesh = Mesh(
        int(row["fsdp"]),
        pipeline,
        int(row["tp"]),
        int(row["cp"]),
        sequence_parallel=int(row["tp"]) > 1,
        sharing=Sharing("parameters", reshard=pipeline == 1),
    )
    job = Job(
        own,
        machine_of("h200_hgx" if row["gpu"] == "H200" else "h100_96gb", gpus),
        mesh,
        framework,
        int(row["seq"]),
        max(1, local // microbatches),
        microbatches,
        schedule="interleaved_1f1b" if interleaved else "1f1b",
        chunks=2 if interleaved else 1,
        recompute=recompute,
        precision=precision,
    )
    pace, memory = number(row.get("tokens_per_s_per_gpu")), number(row.get("memory_GiB"))
    return [
        Case(
            row["id"],
            job,
            pace and job.tokens / pace / gpus,
            memory and memory * GIB,
            configuration=row["id"],
            asks=("time", "memory"),
            fits=not rowwise,
            note="FP8 scaled by rows is taken as no faster than 16 bits: the two given rows of it" if rowwise else "",
        )
    ]


def automodel(row: Row) -> list[Case]:
    """A row of AutoModel's tables."""
    names = {
        "DeepSeek V3 671B": "deepseek_v3",
        "Kimi K2": "kimi_k2",
        "Qwen3 MoE 30B": "qwen3_30b_a3b",
        "GPT-OSS 20B": "gpt_oss_20b",
        "GPT-OSS 120B": "gpt_oss_120b",
        "Llama3 70B": "llama3_70b",
        "Llama3 70B 2-node": "llama3_70b",
        "Llama3 8B": "llama3_8b",
        "Qwen2.5 7B": "qwen25_7b",
        "Qwen2.5 32B": "qwen25_32b",
        "Qwen2.5 32B 2-node": "qwen25_32b",
    }
    if row["model"] not in names:
        return refused(row, "hybrid Mamba layers are not modelled")
    gpus, tensor, pipeline, context = int(row["gpus"]), int(row["tp"]), int(row["pp"]), int(row["cp"])
    data = gpus // (tensor * pipeline * context)
    local, sequences = int(row["local_batch"]), int(row["micro_batch"])
    lora = "LoRA" in row["task"]
    own = architecture(names[row["model"]])
    experts = whole(row["ep"], 1) if own.experts else 1
    chunks = whole(row["vp"], 1)
    if chunks * pipeline > own.num_layers:
        chunks = own.num_layers // pipeline
    if own.experts and row["ep"] == "-":
        experts = min(8, gpus)
    per_flush = max(1, local // sequences) if pipeline > 1 else max(1, int(row["global_batch"]) // (data * sequences))
    repeats = max(1, int(row["global_batch"]) // (data * sequences * per_flush))
    job = Job(
        own,
        machine_of("dgx_h100", gpus),
        Mesh(data, pipeline, tensor, context, experts, sequence_parallel=tensor > 1, sharing=Sharing("parameters")),
        software_of("automodel"),
        int(row["seq"]),
        sequences,
        per_flush,
        schedule="interleaved_1f1b" if chunks > 1 else "1f1b",
        chunks=chunks,
        adapters=Adapters(8) if lora else None,
    )
    if sum(fullest(job)[1].values()) > job.machine.device.memory_bytes:
        job = replace(job, recompute="full")
    return [
        Case(
            row["id"],
            job,
            number(row.get("step_s")),
            configuration=row["id"],
            repeats=repeats,
            note=f"recomputation is not printed; {job.recompute} by memory" + ("; LoRA: frozen weights" * lora),
        )
    ]


def simumax(row: Row) -> list[Case]:
    """A row of SimuMax's table: shortened models on one node."""
    layers, hidden, latent = int(row["layers"]), int(row["hidden"]), row["model"].startswith("deepseek")
    if latent:
        known = architecture(row["model"].replace("deepseekv", "deepseek_v"))
        own = replace(known, num_layers=layers, num_dense_layers=1)
    else:
        own = Architecture(
            row["model"],
            layers,
            hidden,
            int(row["heads"]),
            int(row["vocab"]),
            int(row["kv_heads"]),
            inner=int(row["ffn"]),
        )
    tensor = int(row["tp"])
    job = Job(
        own,
        machine_of("dgx_b200", int(row["gpus"])),
        Mesh(
            int(row["dp"]),
            int(row["pp"]),
            tensor,
            int(row["cp"]),
            int(row["ep"]),
            sequence_parallel=tensor > 1,
        ),
        software_of("simumax"),
        int(row["seq"]),
        int(row["micro_batch"]),
        int(row["num_microbatches"]),
    )
    time, memory = number(row.get("measured_ms")), number(row.get("measured_alloc_GiB"))
    return [
        Case(
            row["id"],
            job,
            time and time / 1e3,
            memory and memory * GIB,
            configuration=row["id"],
            asks=("time", "memory"),
        )
    ]


def primus(row: Row) -> list[Case]:
    """A row of Primus' projections."""
    names = {"Llama-3.1-8B": "llama3_8b", "Llama-3.1-70B": "llama3_70b", "Mixtral-8x22B": "mixtral_8x22b"}
    gpus, pipeline = 8 * int(row["nodes"]), int(row["pp"])
    chunks = whole(row["vpp"], 1)
    job = Job(
        architecture(names[row["model"]]),
        machine_of(f"{row['gpu'].lower()}_8", gpus),
        Mesh(
            gpus // pipeline,
            pipeline,
            expert=int(row["ep"]),
            sharing=Sharing("parameters" if row["fsdp"] == "1" else "optimizer"),
        ),
        software_of("megatron_core"),
        int(row["seq"]),
        int(row["micro_batch"]),
        16,
        schedule="interleaved_1f1b" if chunks > 1 else "1f1b",
        chunks=chunks,
        precision="fp8" if row["precision"] == "FP8" else "bf16",
    )
    return [Case(row["id"], job, note="16 microbatches assumed; the source prints another tool's projection")]
