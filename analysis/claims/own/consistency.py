"""Consistency within one record: fields that follow from other fields, whatever values were accepted before.

Idle time is devices x makespan less busy time, tokens per second are tokens over seconds, the terms of a step add up
to its time. A number that was changed alone breaks one of these.
"""

import re
from collections.abc import Iterator, Sequence
from math import isclose
from typing import Any

from analysis.claims.claim import Claim, Record, claim, section
from analysis.claims.expected import held_experiments, read_table
from analysis.claims.own.regression import need_of
from analysis.records.published import Printed

HOLDS = "holds"
_PARTS = ("fill", "switch", "drain")
_A_DEVICE = ("busy_s", "peak_in_flight", "peak_memory_bytes", "h2d_bytes", "d2h_bytes", "net_bytes", "replay_busy_s")
_REPLAYED = 1.05  # a replay has no waiting, but the processor's clock counts in ticks
_HAIR = 1 + 1e-9

Identity = tuple[str, Any, Any]  # name, the value found (or whether a condition holds), the value due (or True)


@section(170, "What follows within a record")
def claims() -> Iterator[Claim]:
    """A claim for each record with accepted values."""
    due = Printed(HOLDS, "arithmetic")
    for experiment in held_experiments():
        for row in read_table(experiment):
            need, evidence = need_of(experiment, row), row.get("evidence") or "simulated"
            given = {"published": due, "need": need, "experiment": experiment, "evidence": evidence}
            yield claim("consistency/{need}", broken, needs=(need,), **given)


def broken(run: Record) -> str:
    """`holds`, or the fields of a record that contradict others."""
    wrong = [f"{name} is {found}, {due} follows" for name, found, due in identities(run) if not _near(found, due)]
    return "; ".join(wrong) or HOLDS


def identities(run: Record) -> Iterator[Identity]:
    """All identities of a record; a run that did not end well has few."""
    for name in (name for name in _A_DEVICE if isinstance(run.get(name), list)):
        yield f"the length of {name}", len(run[name]), run["num_devices"]
    if run["status"] != "ok":
        return
    if _has(run, "busy_s", "span_s"):
        devices, makespan_s, busy_s, idle_s = run["num_devices"], run["makespan_s"], sum(run["busy_s"]), run["idle_s"]
        yield "idle_s", idle_s, devices * makespan_s - busy_s
        yield "bubble_makespan", run["bubble_makespan"], idle_s / (devices * makespan_s)
        yield "bubble_over_ideal", run["bubble_over_ideal"], idle_s / busy_s
        yield "bubble_span", run["bubble_span"], 1 - busy_s / devices / run["span_s"]
        yield "intra_s", run["intra_s"], max(0.0, idle_s - sum(run[f"{part}_s"] for part in _PARTS))
        yield "busy, span and makespan in this order", max(run["busy_s"]) <= run["span_s"] * _HAIR, True
        yield "span_s within makespan_s", run["span_s"] <= makespan_s * _HAIR, True
    if _has(run, "comm_total_s", "comm_exposed_s"):
        yield "comm_exposed_s within comm_total_s", 0 <= run["comm_exposed_s"] <= run["comm_total_s"] * _HAIR, True
    if _has(run, "partition_layers", "num_stages"):  # such as `4-4-4`, or `4-5|2-2-2-1-0*` with other backward stages
        forward, _, backward = str(run["partition_layers"]).partition("|")
        yield "num_stages", run["num_stages"], len(forward.split("-"))
        yield "num_backward_stages", run["num_backward_stages"], len((backward or forward).split("-"))
        if run["cost"] == "published":
            found = sum(int(number) for number in re.findall(r"\d+", backward or forward))
            yield "the layers of partition_layers", found, run["config"]["model"]["num_layers"]
    if _has(run, "tokens_per_s", "step_time_s", "tokens_per_step"):
        yield "tokens_per_s", run["tokens_per_s"], run["tokens_per_step"] / run["step_time_s"]
    if run.get("step_terms_s") and _has(run, "step_time_s"):
        yield "the sum of step_terms_s", sum(run["step_terms_s"].values()), run["step_time_s"]
    yield from _OF_MODE.get(run["mode"], lambda _: iter(()))(run)


def _has(run: Record, *names: str) -> bool:
    return all(run.get(name) is not None and run[name] == run[name] for name in names)


def _of_tokens(run: Record) -> Iterator[Identity]:
    """Tokens of a step from its configuration, unless a search chose the microbatches."""
    sequences = run["config"]["workload"].get("microbatch_sequences")
    length = (run["config"]["model"] or {}).get("seq_len")
    if _has(run, "tokens_per_step") and sequences and length and "microbatch_sequences" not in run:
        yield "tokens_per_step", run["tokens_per_step"], run["num_microbatches"] * sequences * length


def _of_prediction(run: Record) -> Iterator[Identity]:
    if _has(run, "tokens_per_s_low", "tokens_per_s_high"):
        inside = run["tokens_per_s_low"] <= run["tokens_per_s"] <= run["tokens_per_s_high"]
        yield "tokens_per_s between its bounds", inside, True
    if run.get("device_bytes_by_class"):
        classes = sum(run["device_bytes_by_class"].values())
        yield "the largest of peak_memory_bytes", max(run["peak_memory_bytes"]), classes


def _of_closed_forms(run: Record) -> Iterator[Identity]:
    sizes, intensities = run["batch_sequences"], run["intensity_flop_per_byte"]
    yield "reload_over_recompute", run["reload_over_recompute"], run["reload_s"] / run["recompute_s"]
    yield "intensity_flop_per_byte in order", intensities, sorted(intensities)
    least = run["smallest_compute_bound_batch"]
    if least is not None:
        bound = [size for size, each in zip(sizes, intensities, strict=True) if each >= run["ridge_flop_per_byte"]]
        yield "batch_sequences that are bound by compute", bound, [size for size in sizes if size >= least]


def _of_replay(run: Record) -> Iterator[Identity]:
    if _has(run, "replay_makespan_s", "replay_busy_s"):
        share = sum(run["replay_busy_s"]) / (run["num_devices"] * run["replay_makespan_s"])
        yield "replay_bubble_makespan", run["replay_bubble_makespan"], 1 - share
        inside = 0 < run["replay_makespan_s"] <= run["makespan_s"] * _REPLAYED
        yield "replay_makespan_s within makespan_s", inside, True


def _near(found: Any, due: Any) -> bool:
    if isinstance(found, Sequence) and isinstance(due, Sequence):
        return list(found) == list(due)
    return isclose(found, due, rel_tol=1e-6, abs_tol=1e-9)


_OF_MODE = {"simulate": _of_tokens, "predict": _of_prediction, "roofline": _of_closed_forms, "train": _of_replay}
