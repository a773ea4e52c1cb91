"""Rows of Megatron's family: the BLOOM search, vTrain's cluster, scaling tables, zero-bubble's table 4."""

from dataclasses import replace

from analysis.predictions.clusters.case import Case, Row, machine_of, number, refused, software_of, whole
from rpbench.ir.partition import split_evenly
from rpbench.mesh.job import Job
from rpbench.mesh.layout import Axis, Mesh, Sharing
from rpbench.workload.architecture import Architecture

DEEPSPEED: tuple[Axis, ...] = ("tensor", "data", "context", "pipeline")
NEWER_SESSIONS = "2022-02-25"
EMBEDDING_PARAMETERS = 1.8e9  # of the BLOOM search's models besides their layers, in its own sizes
OTHER_BATCH = {"bloom_a100_topologies/79"}  # took what 2048 sequences take, not its 1568, as no other row of 1568 did
KNOWN_LAYERS = {("14336", "181B"): 72}  # stated in other rows of the same document


def bloom(row: Row) -> list[Case]:
    """A row of the BLOOM search."""
    hidden, tensor, pipeline = int(row["hidden"]), int(row["tp"]), int(row["pp"])
    gpus = int(row["gpus"])
    data = gpus // (tensor * pipeline)
    layers = whole(row["layers"], 0) or _layers(row, hidden, pipeline)
    heads = whole(row["heads"], 96 if hidden == 14400 else 64)
    own = Architecture("bloom", layers, hidden, heads, 250_000, gated=False, tied=True, biases=True)
    framework = software_of("megatron_deepspeed")
    if "fp32" in row["precision"]:
        framework = replace(framework, accumulate_bytes=6, gradient_bytes=4)
    elif row["zero_stage"] == "0":
        framework = replace(framework, accumulate_bytes=8)
    sequences = int(row["micro_batch"])
    job = Job(
        own,
        machine_of("jean_zay_a100", gpus),
        Mesh(
            data,
            pipeline,
            tensor,
            order=DEEPSPEED,
            sharing=Sharing("optimizer" if row["zero_stage"] == "1" else "none"),
        ),
        framework,
        int(row["seq"]),
        sequences,
        max(1, round(int(row["global_batch"]) / (data * sequences))),
        recompute="full",
        cut=cut_with_ends(layers, pipeline) if row["partition"] == "transformer|embedding" else (),
    )
    flagged = "exchanged" in row.get("note", "") or row.get("repeats_earlier_row") == "1"
    memory = number(row.get("memory_GB"))
    return [
        Case(
            row["id"],
            job,
            number(row.get("sec_per_iteration")),
            memory and memory * 1e9,
            early=row["date"] < NEWER_SESSIONS,
            configuration=f"{hidden}/{layers}/{heads}/{tensor}/{pipeline}/{data}/{sequences}/{row['date']}",
            fits=not flagged and row["id"] not in OTHER_BATCH,
            verdict="oom" if row.get("status") == "oom" else "",
            asks=("time", "memory"),
            note="" if row["layers"] else f"{layers} layers from the model's size",
        )
    ]


def _layers(row: Row, hidden: int, pipeline: int) -> int:
    size = float(row["size"].rstrip("B")) * 1e9
    stated = KNOWN_LAYERS.get((row["hidden"], row["size"]))
    return stated or pipeline * round((size - EMBEDDING_PARAMETERS) / (12 * hidden**2) / pipeline)


def cut_with_ends(layers: int, stages: int) -> tuple[int, ...]:
    """Layers of each stage where embedding and head count as a layer each."""
    counts = list(split_evenly(layers + 2, stages))
    counts[0] -= 1
    counts[-1] -= 1
    return tuple(counts)


def vtrain(row: Row) -> list[Case]:
    """A row of vTrain's cluster."""
    hidden, layers = int(row["hidden"]), int(row["layers"])
    own = Architecture("gpt", layers, hidden, int(row["heads"]), 50257, gated=False, tied=True, biases=True)
    mesh = Mesh(int(row["dp"]), int(row["pp"]), int(row["tp"]), order=DEEPSPEED, sharing=Sharing("none"))
    job = Job(
        own,
        machine_of("a100_800gbps", int(row["gpus"])),
        mesh,
        software_of("megatron_2022"),
        int(row["seq"]),
        int(row["micro_batch"]),
        int(row["num_microbatches"]),
        recompute="full",
    )
    time = number(row.get("iteration_ms"))
    return [Case(row["id"], job, time and time / 1e3, configuration=f"{mesh}{row['micro_batch']}{hidden}")]


def scaling(row: Row) -> list[Case]:
    """A row of Megatron's weak scaling tables."""
    new = row["gpu"] == "H100"
    hidden, layers, pipeline = int(row["hidden"]), int(row["layers"]), int(row["pp"])
    own = Architecture(
        row["model"], layers, hidden, int(row["heads"]), int(row["vocab"]), gated=False, tied=not new, biases=not new
    )
    tensor, data = int(row["tp"]), int(row["dp"])
    per_pipeline = int(row["global_batch"]) // data
    sequences = whole(row["micro_batch"], 2 if pipeline == 1 else 1)
    chunks = whole(row["vpp"], _chunks(layers, pipeline) if new else 1)
    mesh = Mesh(
        data, pipeline, tensor, sequence_parallel=new and tensor > 1, sharing=Sharing("optimizer" if new else "none")
    )
    job = Job(
        own,
        machine_of("dgx_h100" if new else "dgx_a100", int(row["gpus"])),
        mesh,
        software_of("megatron_core" if new else "megatron_2021"),
        int(row["seq"]),
        sequences,
        max(1, per_pipeline // sequences),
        schedule="interleaved_1f1b" if chunks > 1 else "1f1b",
        chunks=chunks,
        recompute="none" if new else "full",
    )
    return [Case(row["id"], job, note=f"microbatches of {sequences}, {chunks} chunks a device" if new else "")]


def _chunks(layers: int, pipeline: int) -> int:
    """Chunks where they are not printed: the most that divide, up to 12; one layer each where none does."""
    if pipeline == 1:
        return 1
    each = layers // pipeline
    return max((v for v in range(1, 13) if each % v == 0), default=1) if each % 2 == 0 or each < 13 else each


def zero_bubble(row: Row) -> list[Case]:
    """A row of zero-bubble's table 4; first and last stage have one layer less."""
    pipeline, layers, hidden = int(row["pp"]), int(row["layers"]), int(row["hidden"])
    own = Architecture(
        row["model"],
        layers,
        hidden,
        int(row["heads"]),
        50257,
        gated=False,
        biases=True,
        dropout=0.1,
        learned_positions=1024,
    )
    names = {"zb_1p": "zb_h1", "zb_2p": "zb_h2", "1f1b": "1f1b", "interleaved_1f1b": "interleaved_1f1b"}
    chunks = (layers + 2) // pipeline if row["schedule"] == "interleaved_1f1b" else 1
    job = Job(
        own,
        machine_of("dgx_a100", int(row["gpus"])),
        Mesh(pipeline=pipeline, sharing=Sharing("none")),
        software_of("zero_bubble"),
        int(row["seq"]),
        int(row["micro_batch"]),
        int(row["num_microbatches"]),
        schedule=names[row["schedule"]],
        chunks=chunks,
        cut=cut_with_ends(layers, pipeline * chunks),
    )
    pace, memory = number(row.get("samples_per_s_per_gpu")), number(row.get("memory_GB"))
    return [
        Case(
            row["id"],
            job,
            pace and job.global_batch / pace / job.machine.size,
            memory and memory * 1e9,
            configuration=row["id"],
            asks=("time", "memory"),
            exact=True,
            note="vocabulary of 50257 assumed",
        )
    ]


def vocab_parallel(row: Row) -> list[Case]:
    """A row of the vocabulary's own table whose head stands on the last stage; stages from their printed times."""
    pipeline, layers, hidden = int(row["pp"]), int(row["layers"]), int(row["hidden"])
    times = [float(each) for each in row["forward_us_per_stage"].split()]
    layer_us = times[1] / (layers // pipeline)
    cut = [round(each / layer_us) for each in times[:-1]] + [int(row["layers_on_last_stage"])]
    if row["method"] not in ("base", "redis") or sum(cut) != layers:
        return refused(row, "the head is cut over the devices")
    own = Architecture(
        "gpt", layers, hidden, int(row["heads"]), int(row["vocab"]), inner=int(row["ffn"]), gated=False, biases=True
    )
    job = Job(
        own,
        machine_of("dgx_a100", int(row["gpus"])),
        Mesh(pipeline=pipeline, sharing=Sharing("none")),
        software_of("vocab_parallel"),
        int(row["seq"]),
        int(row["micro_batch"]),
        int(row["num_microbatches"]),
        cut=tuple(cut),
    )
    time, memory = number(row.get("iteration_ms")), number(row.get("max_allocated_MB"))
    return [
        Case(
            row["id"],
            job,
            time and time / 1e3,
            memory and memory * 2**20,
            configuration=row["id"],
            asks=("time", "memory"),
        )
    ]
