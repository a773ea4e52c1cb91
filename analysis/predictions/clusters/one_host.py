"""Rows of one host: bytes of fine-tuning on one device, and training whose states live on SSDs.

These runs are no jobs of a mesh; what is said of them follows from a few counts, and constants that name their rows.
"""

from collections.abc import Callable

from analysis.predictions.clusters.case import Case, Row, Said, number
from rpbench.workload.architecture import architecture

GIB = 2.0**30

# --- PEFT's comparison of methods --------------------------------------------------------------------------------

LEARNING = 16.0  # bytes of a parameter that learns: weight, gradient and two moments in fp32
WHOLE = 8.0  # the same where all weights learn, in bf16
CAST = 4.0  # bytes of an adapter's input, copied to fp32 and kept for its gradient
DELTA = 4.0  # bytes of a weight's change that a method makes whole and keeps


TOKENS = 4 * 768  # of the fullest batch
_LLAMA = architecture("llama32_3b")
_LAYERS, _H, _KV, _F = _LLAMA.num_layers, _LLAMA.hidden, _LLAMA.key_value_heads * _LLAMA.head_dim, _LLAMA.inner
MAPS = {  # (inputs, outputs) of Llama's linear maps
    "q_proj": (_H, _H),
    "k_proj": (_H, _KV),
    "v_proj": (_H, _KV),
    "o_proj": (_H, _H),
    "gate_proj": (_H, _F),
    "up_proj": (_H, _F),
    "down_proj": (_F, _H),
}
LLAMA_BYTES = 20.2e9  # without a method: 16 given rows
FLUX_BYTES = 9.6e9  # the same of the diffusion model, whose blocks are checkpointed: 9 given rows
FLUX_CAST, FLUX_DELTA = 0.42e9, 3.3e9  # what adapters' inputs, and whole changes of weights, add there: the same rows
# What a method keeps besides what learns: nothing, inputs in fp32 (the usual), or the whole change of a weight as well.
LIGHT = {"MISS", "ROAD", "LN_TUNING", "PROMPT_TUNING", "P_TUNING", "BEFT", "ADAPTION_PROMPT", "TRAINABLE_TOKENS"}
LIGHT |= {"PREFIX_TUNING", "OFT", "PSOFT", "full"}
WHOLE_CHANGE = {"FOURIERFT", "WAVEFT", "LOHA", "HIRA", "LOKR", "BOFT", "RANDLORA", "FROD", "C3A", "DORA", "OSF"}


def peft(row: Row) -> list[Case]:
    """A fine-tuning method on one L40S: bytes that the allocator had at most."""
    learns, method = float(row["trainable_params"]), "DORA" if "dora" in row["file"].split("/")[-1] else row["method"]
    if "FLUX" in row["model"]:
        found = FLUX_BYTES + FLUX_CAST * (method not in LIGHT) + FLUX_DELTA * (method in WHOLE_CHANGE)
    else:
        found = LLAMA_BYTES + _kept_bytes(method, row["target_modules"].split())
    learning = WHOLE - 2.0 if method == "full" else LEARNING  # the weights themselves are in the rest
    said = Said(memory_bytes=found + learning * learns)
    memory = number(row.get("memory_max_bytes"))
    return [Case(row["id"], None, memory_bytes=memory, said=said, configuration=row["id"], asks=("memory",))]


def _kept_bytes(method: str, targets: list[str]) -> float:
    """Bytes a method keeps for the maps that it changes, of all layers."""
    maps = [MAPS[name] for name in targets if name in MAPS]
    if method == "IA3":  # scales outputs, or the input of the last map, and keeps them
        widths = [k if name == "down_proj" else n for name, (k, n) in zip(targets, maps, strict=True)]
        return CAST * TOKENS * _LAYERS * sum(widths)
    found = 0.0 if method in LIGHT else CAST * TOKENS * _LAYERS * sum(k for k, _ in maps)
    return found + (DELTA * _LAYERS * sum(k * n for k, n in maps) if method in WHOLE_CHANGE else 0.0)


# --- torchtune ---------------------------------------------------------------------------------------------------

RECIPE_BYTES = 2.5e9  # activations under checkpointing, chunked logits and contexts; assumed
FOUR_BITS = 0.56  # bytes of a quantised weight with its scales (NF4, blocks of 64, arXiv 2305.14314)


def torchtune(row: Row) -> list[Case]:
    """Peak bytes of a recipe on a device; the optimizer of a full one runs in the backward, its states on the host."""
    names = {"Llama 3.1 8B": "llama3_8b", "Llama 3.1 70B": "llama3_70b", "Llama 3.1 405B": "llama31_405b"}
    if row["model"] not in names:
        why = "model and method are not printed with the row"
        return [Case(row["id"], None, fits=False, asks=("memory",), note=why)]
    own, gpus = architecture(names[row["model"]]), int(row["gpus"])
    matrices = own.embedding_parameters + own.head_parameters
    bits = FOUR_BITS if row["method"] == "QLoRA" else 2.0
    weights = bits * (own.total_parameters - matrices) + 2.0 * matrices
    unit = 2.0 * 2.0 * max(matrices / 2, own.total_parameters / own.num_layers) * (gpus > 1)
    gradients = 2.0 * own.total_parameters / own.num_layers if row["method"] == "full" and gpus == 1 else 0.0
    said = Said(memory_bytes=weights / gpus + unit + gradients + RECIPE_BYTES, devices=gpus)
    memory = number(row.get("peak_memory_GiB_per_gpu"))
    return [
        Case(
            row["id"],
            None,
            memory_bytes=memory and memory * GIB,
            said=said,
            configuration=row["id"],
            fits="host" not in row.get("note", ""),
            asks=("memory",),
            note="batch and length are not printed",
        )
    ]


# --- LoHan -------------------------------------------------------------------------------------------------------

LENGTH = 1024
SEQUENCE_S = 4.0e-11  # seconds of a device for a parameter and sequence of 1,024 tokens, recomputed; all given rows
HOST_S = 0.85e-9  # of the host for a parameter: Adam and conversions; rows of 12 SSDs and small batches
SSD_S = 4.4e-9  # of one SSD for a parameter: 28 bytes at 6.4 GB/s both ways; rows of 1 to 12 SSDs
SHARPNESS = 5.0  # of the larger of computing and moving: what runs beside something else slows it a little


def lohan(row: Row) -> list[Case]:
    """A job whose weights and states pass through host and SSDs once a step, beside the devices' work."""
    gpus, batch, size = int(row["gpus"]), int(row["global_batch"]), float(row["params"])
    computes = SEQUENCE_S * size * batch / gpus
    moves = size * (HOST_S + SSD_S / int(row["ssds"]))
    step = (computes**SHARPNESS + moves**SHARPNESS) ** (1.0 / SHARPNESS)
    tokens, rate = batch * LENGTH, number(row.get("tflops_total"))
    measured = rate and 6.0 * size * tokens / (rate * 1e12)  # how the source counts is not said: up to one factor
    return [Case(row["id"], None, measured, said=Said(step, tokens, None, gpus), configuration=row["id"])]


ONE_HOST: dict[str, Callable[[Row], list[Case]]] = {
    "peft_method_comparison": peft,
    "torchtune_memory": torchtune,
    "lohan_rtx4090": lohan,
}
