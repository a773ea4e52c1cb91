"""What the evidence says about the published data, in plain words; every number in them is a verdict's."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from analysis.claims.claim import EVALUATED, REPRODUCED, Verdict
from analysis.exhibits.style import BUBBLES, method_name, model_name
from analysis.records.paper import PUBLISHED_MODELS
from analysis.records.runs import SCHEDULES


@dataclass(frozen=True)
class Finding:
    """One thing a reader should know.

    Args:
        columns: headings of a table, the subjects' first; empty where there is no table.
        rows: a subject each, with the numbers found for it.
        claims: ids of the claims it rests on, beside those of the numbers.
    """

    title: str
    text: str
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, tuple["Number", ...]], ...] = ()
    claims: tuple[str, ...] = ()


@dataclass(frozen=True)
class Number:
    """A number as it is shown, and the claim it is of."""

    text: str
    claim: str


Verdicts = Mapping[str, Verdict]


def findings(verdicts: Iterable[Verdict]) -> list[Finding]:
    """The findings whose evidence is there; one that misses a run is left out."""
    known = {verdict.claim.id: verdict for verdict in verdicts if verdict.kind in EVALUATED}
    found = []
    for make in _FINDINGS:
        try:
            found.append(make(known))
        except KeyError:  # a verdict it would quote is not there
            continue
    return found


def _ours(known: Verdicts, claim: str) -> Number:
    return Number(known[claim].claim.shown(known[claim].value), claim)


def _theirs(known: Verdicts, claim: str) -> Number:
    published = known[claim].claim.published
    return Number(published.text if published else "", claim)


def _number(known: Verdicts, pattern: str, model: str) -> Number:
    """A pattern names a claim of a model; one that begins with `=` means its published value."""
    read = _theirs if pattern[0] == "=" else _ours
    return read(known, pattern.removeprefix("=").format(model))


def _by_model(known: Verdicts, title: str, text: str, columns: Mapping[str, str]) -> Finding:
    """A finding with a row a model and a pattern a column."""
    rows = tuple(
        (model_name(model), tuple(_number(known, pattern, model) for pattern in columns.values()))
        for model in PUBLISHED_MODELS
    )
    return Finding(title, text, ("model", *columns), rows)


# --- the findings --------------------------------------------------------------------------------------------


def _simulator(known: Verdicts) -> Finding:
    cells = {(schedule, model): _met(known, schedule, model) for schedule in SCHEDULES for model in PUBLISHED_MODELS}
    met, printed = (sum(counts) for counts in zip(*cells.values(), strict=True))
    whole = sum(good == all_of_them for good, all_of_them in cells.values())
    rows = tuple(
        (
            model_name(model),
            tuple(
                Number("{} of {}".format(*cells[schedule, model]), f"figure17/{schedule}/{model}/makespan_ms")
                for schedule in SCHEDULES
            ),
        )
        for model in PUBLISHED_MODELS
    )
    return Finding(
        "The published simulation is reproduced",
        f"An independent simulator meets {met} of {printed} printed numbers of figure 17 to their last digit; "
        f"{whole} of {len(cells)} cells completely.",
        ("model", *(method_name(schedule) for schedule in SCHEDULES)),
        rows,
    )


def _met(known: Verdicts, schedule: str, model: str) -> tuple[int, int]:
    """Numbers of a cell that are reproduced, and all of them."""
    kinds = [verdict.kind for name, verdict in known.items() if name.startswith(f"figure17/{schedule}/{model}/")]
    if not kinds:
        raise KeyError(f"figure17/{schedule}/{model}")
    return kinds.count(REPRODUCED), len(kinds)


def _asynchronous(known: Verdicts) -> Finding:
    return _by_model(
        known,
        "The published asynchronous bars are a relabelling",
        "The bars called RoundPipe in figure 17 are the synchronous call with fill and drain set to 0, over an "
        "unchanged denominator; no second call was simulated. Sixty calls back to back, with the rotation carried on, "
        "leave another bubble. It depends on N, the microbatches a call: 8 are a round of the artifact's simulator, "
        f"the throughput runs take 10 or 16. The bubble is bubble_steady, the {BUBBLES['bubble_steady']}.",
        {
            "bar (%)": "=figure17/asynchronous/{}/label",
            "relabelled here (%)": "figure17/asynchronous/{}/label",
            "back to back, N = 8 (%)": "figure17/asynchronous/{}/steady_state_rounds",
            "back to back, N of the runs (%)": "figure17/asynchronous/{}/steady_state_benchmark",
        },
    )


def _causal(known: Verdicts) -> Finding:
    return _by_model(
        known,
        "The fused stage begins before its input has arrived",
        "In the artifact's simulator the head's forward in the fused stage need not wait for the last forward stage. "
        "Where it matters, a machine cannot run that schedule; waiting costs what the columns differ by. Back to back "
        "is bubble_steady, as everywhere here.",
        {
            "published, synchronous (%)": "=figure17/roundpipe/{}/bubble_ratio_percent",
            "with a fused stage that waits (%)": "causal/{}/single",
            "back to back, N = 8 (%)": "figure17/asynchronous/{}/steady_state_rounds",
            "back to back, N = 8, waiting (%)": "causal/{}/steady_8",
        },
    )


def _tuning(known: Verdicts) -> Finding:
    return _by_model(
        known,
        "The baselines were not tuned",
        "The lead is the time of the best classic schedule over RoundPipe's, one synchronous call. With every "
        "schedule's partition searched for, RoundPipe's included, it is smaller; smaller still if the baselines may "
        "recompute before the gradient arrives, as RoundPipe does. RoundPipe stays ahead wherever the lead is above 1.",
        {
            "published cuts": "tuning/{}/lead_published",
            "all cuts searched": "tuning/{}/lead_searched",
            "and recomputing ahead": "tuning/{}/lead_ahead",
        },
    )


def _untuned_1f1b(known: Verdicts) -> Finding:
    name = "discrepancies/untuned_1f1b_8b/published"
    return Finding(
        "A cut that anybody would try first",
        "1F1B on Llama-3.1-8B was simulated with equal stages although the last one holds the head as well: a "
        f"bubble of {_theirs(known, name).text} %. One layer less beside the head leaves {_ours(known, name).text} %.",
        claims=(name,),
    )


def _heads(known: Verdicts) -> Finding:
    models = ("gpt_oss_20b", "qwen3_32b", "qwen3_235b_lora")
    ids = {model: f"figure2/{model}/ratio_true_heads" for model in models}
    recompute_only = {
        model: f"discrepancies/attention_flops_ratio_{short}/published"
        for model, short in zip(models, ("20b", "32b", "235b"), strict=True)
    }
    batch = "figure5/qwen3_235b_lora/smallest_batch_rtx4090_true_heads"
    rows = tuple(
        (
            model_name(model),
            (
                _theirs(known, ids[model]),
                _ours(known, recompute_only[model]),
                _ours(known, ids[model]),
            ),
        )
        for model in models
    )
    return Finding(
        "The closed forms take the heads to add up to the hidden size",
        "They do not in three of the models. With their true width, recomputing costs more, and so does reloading, for "
        "queries and attention output are wider as well: the ratio of figure 2 changes, its conclusion does not. In "
        f"figure 5 the batch from which an RTX 4090 is compute-bound falls from {_theirs(known, batch).text} to "
        f"{_ours(known, batch).text} sequences for the 235B model.",
        ("model", "published ratio", "recompute corrected", "recompute and reload corrected"),
        rows,
        (batch,),
    )


def _batch(known: Verdicts) -> Finding:
    name = "figure5/qwen3_235b_lora/batch_of_the_run"
    true_heads = "figure5/qwen3_235b_lora/smallest_batch_rtx4090_true_heads"
    return Finding(
        "Compute-bound at small batch: dense models only",
        f"By the paper's own formula an upload has to serve {_ours(known, name).text} sequences before an RTX 4090 is "
        f"compute-bound on the 235B model; the published run has {_theirs(known, name).text}. With the true width of "
        f"the heads {_ours(known, true_heads).text} are enough, and it has them.",
        claims=(name, true_heads),
    )


def _prediction(known: Verdicts) -> Finding:
    return _by_model(
        known,
        "Where the simulation predicts the measurement, and where not",
        "Tokens per second that follow from the simulated bubble, beside the measured ones. Links without "
        "contention, no weight uploads, no host and no optimizer are simulated: enough for asynchronous steps of "
        "models up to 32B, too little for synchronous steps of the larger ones and for 235B.",
        {
            f"{kind}, {which}": f"{mark}headline/{{}}/simulated_against_measured_{kind}"
            for kind in ("synchronous", "asynchronous")
            for which, mark in (("measured", "="), ("simulated", ""))
        },
    )


def _fsdp(known: Verdicts) -> Finding:
    pairs = [
        ("Qwen3-1.7B, tokens/s", "discrepancies/fsdp_offload_throughput_1p7b/published"),
        ("Llama-3.1-8B, tokens/s", "discrepancies/fsdp_offload_throughput_8b/published"),
        ("Qwen3-1.7B, thousand tokens", "discrepancies/fsdp_offload_max_seq_len_1p7b/published"),
        ("Llama-3.1-8B, thousand tokens", "discrepancies/fsdp_offload_max_seq_len_8b/published"),
    ]
    return Finding(
        "The FSDP bars are the slower runs",
        "Figures 10 and 11 show FSDP without offload; the library's own README has faster runs, and longer sequences, "
        "with offload. The headline speed-ups do not change, because another baseline is faster still.",
        ("run", "in the figure", "with offload"),
        tuple((words, (_theirs(known, name), _ours(known, name))) for words, name in pairs),
    )


def _hops(known: Verdicts) -> Finding:
    name = "discrepancies/hops_counted_twice_235b/published"
    return Finding(
        "Hops are charged twice",
        f"The communication total of RoundPipe on 235B counts {_theirs(known, name).text} hops, because the output of "
        f"the last forward stage is charged to every backward stage; {_ours(known, name).text} carry a tensor. Times "
        "are not affected.",
        claims=(name,),
    )


_FINDINGS: tuple[Callable[[Verdicts], Finding], ...] = (
    _simulator,
    _asynchronous,
    _causal,
    _tuning,
    _untuned_1f1b,
    _heads,
    _batch,
    _prediction,
    _fsdp,
    _hops,
)
