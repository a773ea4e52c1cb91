"""Rows of smaller sources: atorch's pages of Llama 2, xtuner's of experts on H800, threads and READMEs."""

import re
from dataclasses import replace

from analysis.predictions.clusters.case import Case, Row, Said, machine_of, number, refused, software_of, whole
from analysis.predictions.clusters.readers.megatron import cut_with_ends
from rpbench.mesh.job import Job
from rpbench.mesh.layer_seconds import Adapters, Precision, Recompute
from rpbench.mesh.layout import Mesh, Sharing
from rpbench.workload.architecture import Architecture, architecture

ATORCH_LENGTH = 4096  # of Llama 2; the page does not say
MEGABYTE = 2.0**20


def atorch(row: Row) -> list[Case]:
    """A row of atorch's Llama 2: everything recomputed; its TFLOPs count the recomputation (its HFU)."""
    gpus, stages, tensor = int(row["gpus"]), int(row["pp"]), int(row["tp"])
    own, sharded = architecture("llama2_7b"), row["engine"] == "FSDP"
    data, accumulated = gpus // (stages * tensor), int(row["grad_accum"])
    sequences = max(1, int(row["global_batch"]) // (data * accumulated))
    lora = row["lora"] == "1"
    job = Job(
        own,
        machine_of("a100_800gbps", gpus),
        Mesh(data, stages, tensor, sharing=Sharing("parameters" if sharded else "optimizer")),
        software_of("atorch"),
        ATORCH_LENGTH,
        sequences,
        accumulated,
        recompute="full",
        adapters=Adapters(8, mlp=False) if lora else None,
    )
    rate, memory = number(row.get("tflops_per_gpu")), number(row.get("max_allocated_MB"))
    flops = 8.0 * own.total_parameters + 16.0 * own.num_layers * own.hidden * ATORCH_LENGTH
    return [
        Case(
            row["id"],
            job,
            rate and job.tokens * flops / (rate * 1e12 * gpus),
            memory and memory * MEGABYTE,
            configuration=row["id"],
            asks=("time", "memory"),
            note=f"sequences of {ATORCH_LENGTH} tokens assumed; TFLOPs count everything recomputed",
        )
    ]


def xtuner(row: Row) -> list[Case]:
    """A row of xtuner's page: Qwen3-235B on 256 H800 under Megatron."""
    words = row["configuration"]
    own, gpus = architecture("qwen3_235b_a22b"), int(row["gpus"])
    tensor, pipeline, chunks = int(row["tp"]), int(row["pp"]), whole(row["vpp"])
    data, sequences, stages = gpus // (tensor * pipeline), whole(row["mbs"]), pipeline * chunks
    framework = software_of("xtuner")
    capacity = re.search(r"capacity=(\d)", words)
    if capacity:  # what is beyond is dropped: no expert has more, and no host waits for counts
        host = software_of("megatron_bridge_drops").constants["dispatch_s"]
        busiest = min(float(capacity[1]), framework.constants["imbalance"])
        framework = framework.with_constants({"imbalance": busiest, "dispatch_s": host})
    if "deepep" in words:
        framework = replace(framework, deduplicates=True)
    if "zero" in words:
        framework = replace(framework, gradients_beside=True, parameters_beside=True)
    if "tp overlap" in words:
        framework = replace(framework, hidden_tensor=0.5)
    recompute: Recompute = "full" if "=full" in words else "per_op" if "=moe" in words else "none"
    job = Job(
        own,
        machine_of("h800_cx7", gpus),
        Mesh(data, pipeline, tensor, expert=int(row["ep"]), sequence_parallel=tensor > 1),
        framework,
        int(row["seq"]),
        sequences,
        max(1, int(row["global_batch"]) // (data * sequences)),
        schedule="interleaved_1f1b" if chunks > 1 else "1f1b",
        chunks=chunks,
        recompute=recompute,
        cut=cut_with_ends(own.num_layers, stages) if own.num_layers % stages else (),
    )
    note = "" if row["mbs"] else "microbatches of one sequence assumed"
    time = number(row.get("iteration_s"))
    return [Case(row["id"], job, time, configuration=f"{job.mesh}{sequences}{recompute}", note=note)]


# --- threads and READMEs -----------------------------------------------------------------------------------------

# (words of model and strategy, why): what a row does not say and nothing follows from.
UNSAID = (
    ("Qwen3.6", "layers of linear attention are not modelled"),
    ("DeepSeek-V4", "the architecture is not known here"),
    ("TinyLlama", "the length of a sequence is not printed"),
    ("SDMA", "the device is not named"),
    ("ODC", "device, model and length are not printed"),
    ("FSDP2 padded", "device, model and length are not printed"),
    ("Megatron-SWIFT", "neither mesh nor batch is printed"),
    ("DeepSpeed ZeRO", "neither mesh nor batch is printed"),
)
ACCUMULATED = 16  # microbatches of PithTrain's runs, which print none; assumed
PRINTED = re.compile(r"([\d.]+) TFLOPS/GPU")


def threads(row: Row) -> list[Case]:
    """A row of a thread or a README."""
    text = f"{row['model']} {row['strategy']}"
    for word, reason in UNSAID:
        if word in text:
            return refused(row, reason)
    if rate := PRINTED.search(text):
        return [_from_rate(row, float(rate[1]) * 1e12)]
    gpus = int(row["gpus"])
    tensor, pipeline, context, expert = (whole(row[name]) for name in ("tp", "pp", "cp", "ep"))
    data, local = gpus // (tensor * pipeline * context), whole(row["local_batch"], 0)
    own = _architecture(row["model"])
    pith = "PithTrain" in text
    microbatches = ACCUMULATED if pith else pipeline
    recompute: Recompute = "per_op" if "32B" in row["model"] or "selective" in text else "none"
    precision: Precision = "fp8" if "fp8" in text else "bf16"
    job = Job(
        own,
        machine_of({"RTX 3090": "8x_rtx3090", "B200": "dgx_b200", "H100-96GB": "h100_96gb"}[row["gpu"]], gpus),
        Mesh(
            data,
            pipeline,
            tensor,
            context,
            expert,
            sequence_parallel=tensor > 1,
            sharing=Sharing("optimizer" if pith else "parameters", reshard=pipeline == 1),
        ),
        software_of("torchtitan_eager" if "no compile" in text or "3090" in row["gpu"] else "torchtitan"),
        int(row["seq"]),
        1 if pith else max(1, local // microbatches),
        microbatches,
        schedule="zb_v" if "DualPipeV" in text else "1f1b",
        chunks=2 if "DualPipeV" in text else 1,
        recompute=recompute,
        precision=precision,
    )
    return [Case(row["id"], job, note=f"{ACCUMULATED} microbatches of one sequence assumed" if pith else "")]


def _architecture(name: str) -> Architecture:
    if name.startswith("Llama-3.2-1B"):
        return replace(architecture("llama32_1b"), tied=False)
    return architecture("qwen3_32b" if "32B" in name else "qwen3_30b_a3b")


def _from_rate(row: Row, flops_per_s: float) -> Case:
    """A run whose TFLOPs are printed in the question: ColossalAI's count, everything recomputed."""
    own, gpus, seq_len = (
        architecture("llama2_7b" if row["model"] == "7B" else "llama2_70b"),
        int(row["gpus"]),
        int(row["seq"]),
    )
    h, layers = own.hidden, own.num_layers
    flops = 96.0 * layers * h**2 * (1.0 + seq_len / (6.0 * h) + own.vocab / (16.0 * layers * h))
    group = 1 if "zero2" in row["strategy"] else int(row["tp"]) * int(row["pp"])
    tokens = int(row["local_batch"]) * seq_len * max(1, gpus // group)
    said = Said(tokens * flops / (flops_per_s * gpus), tokens, None, gpus)
    return Case(row["id"], None, said=said, note="from the TFLOPs that the question prints, as Megatron counts them")
