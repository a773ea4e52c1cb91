"""The predicted tables and their files."""

import csv
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import exp, log, sqrt
from pathlib import Path
from typing import Any

from analysis.predictions.compare import CROSS_MODELS, CROSS_PLATFORMS, PLATFORMS, case_of, predicted, throughput_cells
from analysis.records.published import PUBLISHED_MODELS
from rpbench.cost.hardware.machine import machine
from rpbench.cost.published import published_rows
from rpbench.cost.roofline import cost_usd_per_billion_tokens
from rpbench.predict import SYSTEMS, Prediction, predict
from rpbench.predict.case import Case
from rpbench.predict.prediction import NORMAL, STEP_TOKENS, longest_sequence
from rpbench.predict.settings import Settings
from rpbench.predict.systems import STEP
from rpbench.records.record import as_csv, write_atomically

FOLDER = Path(__file__).parent
Row = dict[str, Any]
ROOMY_BYTES = 1e12  # of a device with enough memory for any run

# Constants whose deviations give the interval of a longest sequence.
_MEMORY_CONSTANTS = (
    *("reserved_memory_bytes", "kept_norm_bytes", "kept_gate_bytes", "kept_clamped_gate_bytes", "kept_dispatch_bytes"),
    *("working_gate_bytes", "chunk_logit_bytes", "eager_logit_bytes", "pipeline_logit_bytes", "tensor_logit_bytes"),
    *("megatron_state_bytes", "bucket_bytes"),
)


def throughput() -> list[Row]:
    """Figures 10 and 12: every system, model and machine."""
    return [_throughput_row(cell.cluster, predicted(cell, with_interval=True)) for cell in throughput_cells(*PLATFORMS)]


def cross_platform() -> list[Row]:
    """RoundPipe on other vendors' machines, whose throughput is not published."""
    return [_that_ran(name, case_of("roundpipe", name, model)) for name in CROSS_PLATFORMS for model in CROSS_MODELS]


def _that_ran(cluster: str, case: Case) -> Row:
    """A row of a run with published settings, which did run: with its throughput even if it exceeds our memory."""
    found = predict(case)
    row = _throughput_row(cluster, found)
    if found.status == "ok":
        return row
    roomy = replace(case.basis, values={**case.basis.values, "device_memory_bytes": ROOMY_BYTES}, read=set())
    pace = _throughput_row(cluster, predict(replace(case, basis=roomy)))
    return {**pace, "memory_margin": row["memory_margin"], "breaks": row["breaks"]}


def _throughput_row(cluster: str, found: Prediction) -> Row:
    case, verdict = found.case, found.verdict
    return {
        "system": case.system,
        "platform": {**PLATFORMS, **CROSS_PLATFORMS}[cluster],
        "num_gpus": case.num_devices,
        "model": case.model.published_name,
        "status": found.status,
        "tokens_per_s": _number(found.tokens_per_s),
        "tokens_per_s_low": _number(found.low),
        "tokens_per_s_high": _number(found.high),
        "memory_margin": f"{verdict.margin:.3f}" if verdict else "",
        "breaks": verdict.breaks if verdict and not verdict.fits else "",
        "settings": case.settings.source,
    }


def scaling() -> list[Row]:
    """Figure 15: RoundPipe on 1 to 8 devices with the batch of 8."""
    return [
        _throughput_row(cluster, predict(case_of("roundpipe", cluster, model, devices)))
        for cluster in PLATFORMS
        for model in PUBLISHED_MODELS
        for devices in range(1, 9)
    ]


def max_seq_len() -> list[Row]:
    """Figures 11 and 13: the longest sequence of every system; RoundPipe-sync's is that of RoundPipe."""
    return [
        _length_row(cell.cluster, case_of(cell.system, cell.cluster, cell.model))
        for cell in throughput_cells(*PLATFORMS)
        if cell.system != "roundpipe-sync"
    ]


def _length_row(cluster: str, case: Case) -> Row:
    refusal = SYSTEMS[case.system].refuses(case)
    tokens = longest_sequence(case)
    low, high = _length_interval(case, tokens) if tokens else (0, 0)
    return {
        "system": case.system,
        "platform": PLATFORMS[cluster],
        "model": case.model.published_name,
        "status": "N/A" if refusal else "ok" if tokens else "OOM",
        "max_seq_len_k": tokens // STEP_TOKENS if tokens else "",
        "max_seq_len_tokens": tokens or "",
        "max_seq_len_k_low": low if tokens else "",
        "max_seq_len_k_high": high if tokens else "",
    }


def _length_interval(case: Case, tokens: int) -> tuple[int, int]:
    """The nine-in-ten interval in 1,024 tokens from the deviations of the memory constants; at least one either way."""
    variance = 0.0
    case.basis.read.clear()
    plain = longest_sequence(case, look_above=False)
    for name in sorted(case.basis.read.intersection(_MEMORY_CONSTANTS)):
        varied = longest_sequence(replace(case, basis=case.basis.scaled(name, STEP)), look_above=False)
        effect = log(max(varied, 1) / max(plain, 1)) / log(STEP)
        variance += (effect * case.basis.declared[name].within) ** 2
    factor = exp(NORMAL * sqrt(variance))
    steps = tokens // STEP_TOKENS
    return min(steps - 1, int(steps / factor)), max(steps + 1, round(steps * factor))


def seqlen_sensitivity() -> list[Row]:
    """Figure 16: RoundPipe on Qwen3-1.7B from 512 to 65,536 tokens, with the batches of the run scripts."""
    rows = []
    for row in published_rows("run_settings.csv"):
        if row["experiment"] != "seqlen_sensitivity":
            continue
        case = case_of("roundpipe", "8x_rtx4090", "qwen3_1p7b").of_length(int(row["seq_len_tokens"]))
        batch, calls = int(row["global_batch_sequences"]), int(row["grad_accum_steps"])
        num = int(row["microbatches_per_call"])
        settings = Settings(batch, calls, num, float(row["micro_batch_sequences"]), "run scripts")
        case = replace(case, settings=settings, grain="layer" if "layer" in row["recompute"] else "stage")
        rows.append(_throughput_row("8x_rtx4090", predict(case)) | {"seq_len_tokens": row["seq_len_tokens"]})
    return rows


def cost_efficiency(rates: Iterable[Row]) -> list[Row]:
    """Figure 14: US dollars for 1e9 tokens, from predicted throughput."""
    prices = {name: machine(cluster).price_usd_per_hour for cluster, name in PLATFORMS.items()}
    rows = []
    for row in rates:
        price = prices.get(row["platform"])
        if row["status"] != "ok" or price is None:
            continue
        found = {key: row[key] for key in ("system", "platform", "num_gpus", "model", "status")}
        for end, rate in (("", ""), ("_low", "_high"), ("_high", "_low")):
            dollars = cost_usd_per_billion_tokens(price, float(row[f"tokens_per_s{rate}"]))
            found[f"usd_per_1e9_tokens{end}"] = f"{dollars:.2f}"
        rows.append(found)
    return rows


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def all_tables() -> dict[str, list[Row]]:
    rates = throughput()
    return {
        "throughput": rates + cross_platform(),
        "scaling": scaling(),
        "max_seq_len": max_seq_len(),
        "seqlen_sensitivity": seqlen_sensitivity(),
        "cost_efficiency": cost_efficiency(rates),
    }


def write(path: Path, rows: list[Row]) -> int:
    write_atomically(path, as_csv(rows))
    return len(rows)


def markdown(heads: str, rows: Iterable[Sequence[str]]) -> str:
    """A table of Markdown; its heads are joined by ` | `."""
    rule = " | ".join("---" for _ in heads.split(" | "))
    return "\n".join(f"| {line} |" for line in (heads, rule, *map(" | ".join, rows))) + "\n"


def put(page: Path, name: str, text: str) -> None:
    """Replace the text between the two marks of a name on a page."""
    begin, end = f"<!--{name}-->\n", f"<!--/{name}-->\n"
    before, rest = page.read_text(encoding="utf-8").split(begin)
    write_atomically(page, before + begin + text + end + rest.split(end)[1])


def read(name: str, folder: Path = FOLDER) -> list[Row]:
    with (folder / f"{name}.csv").open(newline="", encoding="utf-8") as source:
        return list(csv.DictReader(source))
