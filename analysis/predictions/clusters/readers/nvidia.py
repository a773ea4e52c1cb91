"""Rows of NVIDIA's own tables: DGX Cloud's benchmarks, and submissions to MLPerf training."""

from dataclasses import replace
from math import gcd

from analysis.predictions.clusters.case import Case, Row, machine_of, number, refused, software_of, whole
from analysis.predictions.clusters.readers.megatron import cut_with_ends
from rpbench.mesh.job import Job
from rpbench.mesh.layer_seconds import Adapters, Precision
from rpbench.mesh.layout import Mesh, Sharing
from rpbench.workload.architecture import Architecture, architecture

# (words of a title, architecture, sequence length): the first that all stand in it.
TITLES = (
    (("grok",), "grok1_314b", 8192),
    (("405b",), "llama31_405b", 8192),
    (("maxtext", "llama2"), "llama2_70b", 4096),
    (("finetuning", "70b"), "llama3_70b", 4096),
    (("finetuning", "8b"), "llama3_8b", 4096),
    (("70b",), "llama3_70b", 8192),
    (("8b",), "llama3_8b", 8192),
    (("nemo megatron",), "gpt3_175b", 2048),
    (("paxml", "175b"), "gpt3_175b", 2048),
    (("paxml", "5b"), "gpt3_5b", 2048),
    (("340b",), "nemotron4_340b", 4096),
    (("15b",), "nemotron4_15b", 4096),
)


# tensor, pipeline, context, chunks, expert, microbatches of rows that leave them out: those of other rows of the model.
MESHES = {
    ("grok1_314b", "H100"): (4, 8, 2, 8, 8, 128),
    ("grok1_314b", "GB200"): (4, 1, 1, 1, 8, 8),
    ("llama31_405b", "H100"): (8, 8, 2, 8, 1, 64),
    ("llama31_405b", "GB200"): (4, 8, 2, 8, 1, 32),
    ("llama3_70b", "H100"): (4, 4, 2, 5, 1, 64),
    ("llama3_8b", "H100"): (1, 1, 2, 1, 1, 32),
    ("gpt3_175b", "H100"): (4, 8, 1, 12, 1, 64),
    ("nemotron4_15b", "H100"): (4, 1, 1, 1, 1, 4),
    ("nemotron4_340b", "H100"): (8, 8, 1, 12, 1, 16),
    ("nemotron4_340b", "GB200"): (8, 4, 1, 12, 1, 8),
}
RELEASES = {"v24.11.1": "nemo_2411", "v25.01.1": "nemo_2411", "v25.02.02": "nemo_2502"}
# Tokens of a device and step in fine-tuning, by model and whether adapters learn: printed by given rows.
TUNED = {
    ("llama3_70b", True): 16384,
    ("llama3_70b", False): 4096,
    ("llama3_8b", True): 16384,
    ("llama3_8b", False): 16384,
}


def dgxc(row: Row) -> list[Case]:
    """A row of DGX Cloud's benchmarks."""
    title = row["title"].lower()
    name, seq_len = next((name, seq) for words, name, seq in TITLES if all(word in title for word in words))
    gpus, seq_len = int(row["gpus"]), whole(row["seq"], seq_len)
    machine = machine_of("gb200_nvl72" if row["gpu"] == "GB200" else "dgx_h100", gpus)
    own = architecture(name)
    if layers := whole(row["layers"], 0):
        own = replace(own, num_layers=layers)
    precision: Precision = "fp8" if row["precision"] == "fp8" else "bf16"
    if "maxtext" in title or "paxml" in title:
        job = _fully_sharded(own, gpus, seq_len, int(row["mbs"]), precision)
    else:
        mesh, chunks, microbatches = _mesh(row, own, gpus, "finetuning" in title, seq_len)
        stages = mesh.pipeline * chunks
        ends = stages > 1 and own.num_layers % stages
        job = Job(
            own,
            machine,
            mesh,
            software_of(_software(row, own)),
            seq_len,
            whole(row["mbs"], 1),
            microbatches,
            schedule="interleaved_1f1b" if chunks > 1 else "1f1b",
            chunks=chunks,
            precision=precision,
            cut=cut_with_ends(own.num_layers, stages) if ends else (),
            adapters=Adapters(32, mlp=False) if "lora" in title else None,
        )
    return [
        Case(
            row["id"],
            job,
            number(row.get("step_s")),
            configuration=f"{row['title'].split(' 24')[0]}{row['precision']}{job.mesh}{row['release']}",
            note="" if row["tp"] else "mesh and batch as in other rows of the model",
        )
    ]


def _software(row: Row, own: Architecture) -> str:
    if own.experts:
        return "nemo_moe_2505" if row["release"] == "v25.05.05" else "nemo_moe"
    return "nemo_tuned" if "Finetuning" in row["title"] else RELEASES.get(row["release"], "nemo_2504")


def _mesh(row: Row, own: Architecture, gpus: int, tuned: bool, seq_len: int) -> tuple[Mesh, int, int]:
    """Mesh, chunks of a rank and microbatches; what a row leaves out is as in others of its model."""
    known = MESHES[own.name, row["gpu"]]
    if row["tp"]:
        pipeline = whole(row["pp"]) if row["pp"] != "41" else 1  # a foot note's mark behind 4 stages that 8 B never has
        found = (
            whole(row["tp"]),
            pipeline,
            whole(row["cp"]),
            whole(row["vp"]),
            whole(row["ep"]),
            whole(row["ga"], known[5]),
        )
    else:
        found = known
    tensor, pipeline, context, chunks, expert, microbatches = found
    data = gpus // (tensor * pipeline * context)
    if tuned:
        microbatches = TUNED[own.name, "LORA" in row["title"]] * gpus // (data * seq_len)
    elif row["gbs"] and row["tp"]:
        microbatches = int(row["gbs"]) // (data * whole(row["mbs"], 1))
    mesh = Mesh(
        data,
        pipeline,
        tensor,
        context,
        expert,
        tensor if own.experts else 0,  # Megatron's default
        sequence_parallel=tensor > 1,
    )
    return mesh, chunks if pipeline > 1 else 1, microbatches


def _fully_sharded(own: Architecture, gpus: int, seq_len: int, sequences: int, precision: Precision) -> Job:
    """MaxText and Paxml: parameters shared over all devices, one microbatch, everything recomputed."""
    return Job(
        own,
        machine_of("dgx_h100", gpus),
        Mesh(gpus, sharing=Sharing("parameters")),
        software_of("xla"),
        seq_len,
        sequences,
        recompute="full",
        precision=precision,
    )


# --- MLPerf ------------------------------------------------------------------------------------------------------

ACCELERATORS = (
    ("H100", "dgx_h100"),
    ("H200", "h200_hgx"),
    ("GB200", "gb200_nvl72"),
    ("GB300", "gb300_nvl72"),
    ("B200", "dgx_b200"),
    ("B300", "dgx_b300"),
    ("MI300X", "mi300x_8"),
    ("MI325X", "mi325x_8"),
    ("MI350X", "mi355x_8"),
    ("MI355X", "mi355x_8"),
)
BENCHMARKS = {
    "gpt3": ("gpt3_175b", 2048),
    "llama2_70b_lora": ("llama2_70b", 8192),
    "llama31_405b": ("llama31_405b", 8192),
    "llama31_8b": ("llama3_8b", 8192),
}
STAGES = {"gpt3": 8, "llama31_405b": 8}


def mlperf(row: Row) -> list[Case]:
    """A submission to MLPerf training; degrees that it does not print follow from batch and accumulation."""
    name = next(machine for word, machine in ACCELERATORS if word in row["accelerator"])
    own, seq_len = architecture(BENCHMARKS[row["benchmark"]][0]), BENCHMARKS[row["benchmark"]][1]
    gpus, batch, accumulated = int(row["gpus"]), int(row["gbs"]), whole(row["grad_accum"], 1)
    machine, lora = machine_of(name, gpus), row["benchmark"].endswith("lora")
    group, sequences, data = _group(row, gpus, batch, accumulated)
    tensor, pipeline, context = _degrees(row, group, name)
    if data * tensor * pipeline * context != gpus:
        return refused(row, f"{gpus} devices are no multiple of a replica's {tensor * pipeline * context}")
    chunks = 8 if row["benchmark"] == "llama31_405b" else whole(row["vp"], 4) if pipeline > 1 else 1
    stages = pipeline * chunks
    job = Job(
        own,
        machine,
        Mesh(data, pipeline, tensor, context, sequence_parallel=tensor > 1, sharing=Sharing("optimizer")),
        software_of("mlperf_lora" if lora else "mlperf"),
        seq_len,
        sequences,
        accumulated,
        schedule="interleaved_1f1b" if chunks > 1 else "1f1b",
        chunks=chunks,
        precision=_low(row, name),
        cut=cut_with_ends(own.num_layers, stages) if own.num_layers % stages else (),
        adapters=Adapters(int(row["lora_rank"]), mlp=False) if lora else None,
    )
    step, rate = number(row.get("step_s_median")), number(row.get("samples_per_s_median"))
    if not step and rate:
        step = batch * (seq_len if row["benchmark"] == "gpt3" else 1) / rate  # GPT-3's rate is of tokens
    printed = (
        "" if row["tp"] else f"tensor {tensor}, pipeline {pipeline}, context {context} from batch and accumulation"
    )
    return [
        Case(
            row["id"],
            job,
            step,
            configuration=f"{row['benchmark']}{name}{job.mesh}{accumulated}",
            note=printed,
        )
    ]


def _low(row: Row, name: str) -> Precision:
    """Eight bits; four in the last round on NVIDIA's late devices, as its submitters said of all language models."""
    late = row["round"] == "v5.1" and name in ("dgx_b200", "dgx_b300", "gb200_nvl72", "gb300_nvl72")
    if late and (row["benchmark"] != "llama31_405b" or row["org"] == "NVIDIA"):
        return "nvfp4"
    return "fp8"


def _group(row: Row, gpus: int, batch: int, accumulated: int) -> tuple[int, int, int]:
    """(devices of a replica, sequences of a microbatch, replicas)."""
    given = [whole(row[name], 0) for name in ("tp", "pp", "cp")]
    both = batch // accumulated  # sequences of all replicas at a time
    if all(given):
        data = gpus // (given[0] * given[1] * given[2])
        return gpus // data, max(1, both // data), data
    sequences = whole(
        row["mbs"], 2 if row["benchmark"] == "gpt3" or (row["benchmark"] == "llama31_8b" and both > gpus) else 1
    )
    data = gcd(both // sequences, gpus) if both >= sequences else 1
    return gpus // data, sequences, data


def _degrees(row: Row, group: int, name: str) -> tuple[int, int, int]:
    """(tensor, pipeline, context): as printed, or as other rows with replicas of that size have them."""
    given = [whole(row[column], 0) for column in ("tp", "pp", "cp")]
    if given[0] and given[1]:
        return given[0], given[1], given[2] or group // (given[0] * given[1])
    pipeline = STAGES.get(row["benchmark"], 1)
    rest = group // pipeline
    if row["benchmark"] == "llama31_405b":
        return rest // 2, pipeline, 2
    if row["benchmark"] == "llama31_8b" or name not in ("dgx_h100", "h200_hgx"):
        return (rest, pipeline, 1) if pipeline > 1 else (1, 1, rest)
    if name == "h200_hgx" and rest == 2:
        return 1, pipeline, 2
    return min(4, rest), pipeline, rest // min(4, rest)
