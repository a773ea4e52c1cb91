"""Figures 10 to 16: measurements of machines that are not here, beside what our model says of each.

A measurement is `predicted` where it lies within the interval that the committed tables of `analysis/predictions/`
give, nine in ten of which are meant to hold; otherwise our model misses it. A miss that is known is declared, with the
value it comes out as, in `analysis/claims/expected/contradictions.csv`; another miss is red. Of figures 12 to 16 the
first predictions were made blind (`analysis/predictions/outcomes.py`); these are the present ones.

A bar of figure 10 whose system a schedule stands for is set against that schedule with the settings of the run script
(experiment=figure10_published): `predicted` within 15 %, otherwise our model misses it, and the missing term is named.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from analysis.claims.claim import Claim, Need, Record, Value, section
from analysis.claims.expected import expected
from analysis.exhibits.style import method_name, model_name
from analysis.predictions.tables import read
from analysis.records.published import OUR_MODELS, Printed, Row, cell, table, where
from rpbench.advice.published_runs import SYSTEMS

_KEYS = ("system", "platform", "model")
_MISS = "outside the nine-in-ten interval of the prediction, {value}: analysis/predictions/README.md names the term"


@dataclass(frozen=True)
class _Figure:
    """A figure of measurements, and the committed predictions of it.

    Args:
        published, column: table and column of what was measured.
        predictions: table of `analysis/predictions/`; its column is `predicted`, with `_low` and `_high`.
        keys: columns of both tables that identify a row.
    """

    number: int
    title: str
    published: str
    column: str
    predictions: str
    predicted: str
    metric: str
    unit: str
    keys: tuple[str, ...] = _KEYS

    @property
    def section(self) -> str:
        return f"Figure {self.number}: {self.title}"

    @property
    def source(self) -> str:
        return f"RoundPipe, figure {self.number}"


_RATE = ("throughput", "tokens/s")
_LENGTH = ("longest sequence", "ktokens")
_FIGURES = (
    _Figure(10, "throughput on 8 RTX 4090", "throughput", "tokens_per_s", "throughput", "tokens_per_s", *_RATE),
    _Figure(11, "longest sequences on 8 RTX 4090", "max_seq_len", "max_seq_len_published_k", "max_seq_len",
            "max_seq_len_k", *_LENGTH),
    _Figure(12, "throughput on 8 A800", "throughput_a800", "tokens_per_s", "throughput", "tokens_per_s", *_RATE),
    _Figure(13, "longest sequences on 8 A800", "max_seq_len_a800", "max_seq_len_published_k", "max_seq_len",
            "max_seq_len_k", *_LENGTH),
    _Figure(15, "RoundPipe on 1 to 8 RTX 4090", "scaling", "tokens_per_s", "scaling", "tokens_per_s", *_RATE,
            keys=("platform", "model", "num_gpus")),
    _Figure(16, "RoundPipe on sequences of 512 to 65,536 tokens", "seqlen_sensitivity", "tokens_per_s",
            "seqlen_sensitivity", "tokens_per_s", *_RATE, keys=("seq_len_tokens",)),
)  # fmt: skip


@section(110)
def claims() -> Iterator[Claim]:
    """Every bar and point of the figures; what did not run is a claim as well."""
    for figure in _FIGURES:
        seen: set[str] = set()
        found = {_key(row, figure.keys): row for row in read(figure.predictions)}
        for row in table(figure.published):
            prediction = found.get(_key(row, figure.keys))
            claim = _claim(figure, row, prediction)
            yield replace(claim, id=f"{claim.id}/again") if claim.id in seen else claim  # a bar that two sources print
            seen.add(claim.id)
    yield _convergence()


def _key(row: Row, keys: Sequence[str]) -> tuple[str, ...]:
    return tuple(str(row[key]) for key in keys)


def _claim(figure: _Figure, row: Row, prediction: dict[str, Any] | None) -> Claim:
    of = ", ".join(_key(row, figure.keys))
    published = cell(figure.published, figure.column, row, of)
    if published is None:
        published = Printed(row["status"], where(figure.published, "status", of, row["source"]))
    system, model = row["system"], OUR_MODELS[row["model"]]
    name = "/".join((figure.published, system, model, *[row[key] for key in figure.keys if key not in _KEYS]))
    return Claim(
        id=name,
        statement_id=f"figure{figure.number}/{system}",
        section=figure.section,
        source="RoundPipe library, README" if system == "fsdp-offload" else figure.source,
        statement=f"{method_name(system)} on {model_name(model)}{_words(row, figure.keys)}: {figure.metric}",
        metric=figure.metric,
        unit=figure.unit if row["status"] == "ok" else "",
        published=published,
        **(_untestable() if prediction is None else _beside(name, published, prediction, figure.predicted)),
    )


def _untestable() -> dict[str, Any]:
    return {"evidence": "measured", "not_testable": "its machine: our model has no such system"}


def _beside(name: str, published: Printed, prediction: dict[str, Any], column: str) -> dict[str, Any]:
    """A claim's fields that follow from its prediction: the value, and how far a measurement may be from it."""
    known = expected(name)
    given: dict[str, Any] = {
        "evidence": "predicted",
        "predicts": True,
        "made_from": "analysis/predictions/",
        "contradiction": _MISS if known is not None else "",
    }
    measured = published.value
    if prediction["status"] != "ok" or isinstance(measured, str):
        status = prediction["status"]
        says = f"{float(prediction[column]):g}" if status == "ok" and not isinstance(measured, str) else status
        return given | {"value": lambda: says}
    value, low, high = (float(prediction[f"{column}{end}"]) for end in ("", "_low", "_high"))
    reach = high - value if measured > value else value - low
    return given | {"value": lambda: value, "wide_tolerance": reach}


def _words(row: Row, keys: Sequence[str]) -> str:
    found = {"num_gpus": "{} devices", "seq_len_tokens": "sequences of {} tokens"}
    words = [found[key].format(row[key]) for key in keys if key in found]
    return f", {words[0]}" if words else ""


def _convergence() -> Claim:
    return Claim(
        id="withheld/convergence",
        section="Convergence",
        source="RoundPipe, artifact, library documentation",
        statement="Weights one step old do not hurt convergence in practice",
        metric="loss",
        evidence="measured",
        not_testable="training runs to convergence, synchronous and asynchronous; the artifact holds no loss curve",
    )


# How far a predicted bar may be from the published one.
NEAR = 0.15
# What the published table has in the place of a bar.
NO_BAR = ("OOM", "N/A")
_EXPERTS = "the interpreter's loop over experts has no actions"
_REFRESH = "the pass that refreshes the weights on the host has no actions"
_GATHERS = "gathers, scatters and copies wait for nothing in the schedule; in DeepSpeed they stand behind computation"
_SUMS = (
    "DeepSpeed sums all gradients, twice the bytes of a scatter, behind the computation; the schedule scatters beside"
)
_FOOTPRINT = "its footprint is 1.06 times the memory; which class of tensors is counted too large is not known"
_PRIVATE = "its batch and settings are not public"
# Bars that our schedule misses by more than that, with the term that it lacks.
MISSES = {
    ("roundpipe", "qwen3_235b_lora"): _EXPERTS,
    ("roundpipe-sync", "qwen3_32b"): _REFRESH,
    ("roundpipe-sync", "qwen3_235b_lora"): _EXPERTS,
    ("zero-2", "qwen3_1p7b"): _SUMS,
    ("zero-infinity", "gpt_oss_20b"): _GATHERS,
    ("zero-infinity", "qwen3_235b_lora"): _GATHERS,
    ("fsdp", "llama31_8b"): _FOOTPRINT,
    ("mobius", "qwen3_32b"): _PRIVATE,
    ("mobius", "qwen3_235b_lora"): _PRIVATE,
}


@section(120, "Figure 10: throughput on 8 RTX 4090, action by action", "RoundPipe, figure 10 (section 5.2)")
def by_action_claims() -> Iterator[Claim]:
    """Every bar of a system that one of our schedules stands for."""
    for row in table("throughput"):
        if row["system"] in SYSTEMS:
            yield _claim_by_action(row)


def _claim_by_action(row: Row) -> Claim:
    system, model = row["system"], OUR_MODELS[row["model"]]
    of = f"{row['system']}, {row['model']}"
    published = cell("throughput", "tokens_per_s", row, of)
    if published is None:
        published = Printed(row["status"], where("throughput", "status", of, row["source"]))
    known = published.value
    term = MISSES.get((system, model), "")
    return Claim(
        id=f"by_action/{system}/{model}",
        statement_id=f"by_action/{system}",
        statement=f"{method_name(system)} on {model_name(model)}: throughput",
        metric="throughput",
        unit="tokens/s" if row["status"] == "ok" else "",
        published=published,
        evidence="predicted",
        needs=(Need("figure10_published", {"mode.system": system, "model": model}),),
        value=lambda record: _pace(record, published.text),
        wide_tolerance=NEAR * known if isinstance(known, float) else None,
        predicts=True,
        contradiction=f"our schedule has {{value}}: {term}" if term else "",
    )


def _pace(row: Record, status: str) -> Value:
    """Our pace, or for a run that has none the words of the published table: what does not fit cannot run either."""
    if row["status"] != "ok":
        return status if status in NO_BAR else "OOM"
    return "ok" if status in NO_BAR else row["tokens_per_s"]
