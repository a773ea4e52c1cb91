"""`show check=communication`: whether the messages of a table pass each other; what torch 2.15's settings do to it."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TextIO

from rpbench.config.loading import load
from rpbench.config.request import Request
from rpbench.cost.transfers import StageBytes
from rpbench.ir.action import Kind
from rpbench.registry import unknown_name
from rpbench.run.assemble import Assembled, assemble
from rpbench.torch_runtime.communication.execution import Durations, Queues, find_levels
from rpbench.torch_runtime.communication.settings import Settings, lower_as_torch
from rpbench.torch_runtime.communication.tokens import Table, Token, read_table
from rpbench.torch_runtime.communication.verdict import judge
from rpbench.torch_runtime.lowering import lower

OWN = ("check", "channels", "grouped", "data_parallel")
SETTINGS = tuple(Settings.__dataclass_fields__)
# One setting at a time, beside torch's own.
VARIED: tuple[dict[str, Any], ...] = (
    {},
    {"max_active_stages": 2},
    {"unshard_lookahead": "auto"},
    {"defer_reduce_grad_wait": True},
    {"defer_pp_recv": True},
    {"max_outstanding_sends": 1},
    {"max_outstanding_sends": 2},
)


@dataclass(frozen=True)
class Asked:
    queues: tuple[Queues, ...]  # kinds of channels that decide the exit status
    grouped: tuple[bool, ...]
    settings: dict[str, Any]  # those of torch 2.15 that were named
    data_parallel: int  # ranks that share the weights of a stage


def check_communication(words: Sequence[str], out: TextIO, told: TextIO) -> int:
    """Print one JSON object to `out` and the same in words to `told`; 1 if the table is not alive, else 0."""
    names = (*OWN, *SETTINGS)
    own = dict(word.partition("=")[::2] for word in words if word.partition("=")[0] in names)
    asked = _asked(own)
    if others := [word for word in words if word.startswith(("draw=", "format=", "export="))]:
        raise ValueError(f"check={own['check']} {others[0]}: the check prints its own answer; show it without check=")
    request = load([*(word for word in words if word.partition("=")[0] not in names), "charge=hops"])
    table, source = _table(request, asked)
    verdicts = [judge(table, queues, grouped=grouped) for queues in asked.queues for grouped in asked.grouped]
    answer = {
        "schedule": request.schedule.file.path.name if request.schedule.file else request.entry.name,
        "messages_by": source,
        "num_ranks": len(table.rows),
        "num_messages": table.num_messages,
        "verdicts": [verdict.fields() for verdict in verdicts],
        **_settings(request, table, asked),
    }
    print(json.dumps(answer, allow_nan=False), file=out, flush=True)
    _tell(answer, told)
    return int(any(verdict.verdict != "alive" for verdict in verdicts))


# --- what is asked --------------------------------------------------------------------------------------------


def _asked(own: dict[str, str]) -> Asked:
    if own["check"] != "communication":
        raise ValueError(unknown_name("check", own["check"], ["communication"]))
    channels = own.get("channels", "all")
    if channels != "all" and channels not in list(Queues):
        raise ValueError(unknown_name("channels", channels, ["all", *Queues]))
    grouped = (_truth("grouped", own["grouped"]),) if "grouped" in own else (False, True)
    settings = {name: _setting(name, own[name]) for name in SETTINGS if name in own}
    Settings(**settings)
    copies = _number("data_parallel", own.get("data_parallel", "1"))
    if copies < 1:
        raise ValueError(f"data_parallel={copies}: at least 1")
    return Asked(tuple(Queues) if channels == "all" else (Queues(channels),), grouped, settings, copies)


def _setting(name: str, value: str) -> Any:
    if name.startswith("defer_"):
        return _truth(name, value)
    if name == "unshard_lookahead":
        return value if not value[:1].isdigit() else tuple(_number(name, each) for each in value.split(","))
    return None if (name, value) == ("max_outstanding_sends", "null") else _number(name, value)


def _truth(name: str, value: str) -> bool:
    if value.lower() not in ("true", "false"):
        raise ValueError(f"{name}={value}: true or false")
    return value.lower() == "true"


def _number(name: str, value: str) -> int:
    if not value.isdigit() or len(value) > 9:
        raise ValueError(f"{name}={value}: a whole number")
    return int(value)


# --- the table ------------------------------------------------------------------------------------------------


def _table(request: Request, asked: Asked) -> tuple[Table, str]:
    """The table, and who placed its messages."""
    file = request.schedule.file
    if file is not None and file.path.suffix == ".csv":
        try:
            table = read_table(file.text)
            if table.is_lowered or len(table.rows) == 1:
                if asked.settings:
                    raise ValueError(
                        f"{next(iter(asked.settings))} decides where messages stand, and the table has them already; "
                        "give its computations alone, or leave the setting out"
                    )
                return table, "file"
            return lower_as_torch(table, Settings(**asked.settings)), "torch 2.15"
        except ValueError as error:
            raise ValueError(f"schedule_file={file.path}: {error}") from None
    lowered = lower(assemble(request).schedule)
    table = read_table(lowered.to_csv(sharded=True), lowered.table.shape.num_stages)
    if not asked.settings:
        return table, "rpbench"
    return lower_as_torch(table, Settings(**asked.settings)), "torch 2.15"


# --- the settings of torch 2.15 -------------------------------------------------------------------------------


def _settings(request: Request, table: Table, asked: Asked) -> dict[str, Any]:
    """Time and bytes under each setting; `no_times` says why there are none."""
    try:
        assembled = assemble(request)
    except ValueError as error:
        return {"settings": [], "no_times": str(error)}
    rules = _Rules(assembled, table, asked.data_parallel)
    variants = (*VARIED, *([asked.settings] if asked.settings and asked.settings not in VARIED else []))
    return {"unit": rules.unit, "settings": [rules.row(varied) for varied in variants]}


class _Rules:
    def __init__(self, assembled: Assembled, table: Table, copies: int) -> None:
        self._table, self._costs, costs = table, assembled.costs, assembled.costs
        self.unit = "slots" if assembled.model is None else "s"
        self._per_second = 1 if assembled.model is None else costs.units_per_second
        self._boundary = assembled.sizes.boundary if assembled.sizes else None
        own = {}
        if assembled.sizes and assembled.schedule.partition:
            stages = StageBytes(assembled.schedule.partition, assembled.sizes)
            own = {stage: stages.stage(stage % table.chain_length, backward=True) for stage in table.rank_of}
        self._weights = {stage: size.weights for stage, size in own.items()}
        self._gradients = {stage: size.gradients for stage, size in own.items()}
        rate = assembled.cluster.collective_bytes_per_s or assembled.cluster.link_bytes_per_s("net")
        if copies > 1 and not (own and rate):
            raise ValueError(
                f"data_parallel={copies}: gathering weights takes the time of their bytes; name model= and cluster="
            )
        part = (copies - 1) / copies / rate if rate and copies > 1 else 0.0
        gather = {stage: size * part for stage, size in self._weights.items()}
        reduce = {stage: size * part for stage, size in self._gradients.items()}
        self._durations = Durations(self._compute, float(costs.hop) / self._per_second, gather, reduce)

    def _compute(self, rank: int, token: Token) -> float:
        members = tuple((Kind[part.kind], part.stage % self._table.chain_length) for part in token.parts)
        work = self._costs.on(rank, self._costs.together(members))
        return float(work.pre + work.main) / self._per_second

    def row(self, varied: dict[str, Any]) -> dict[str, Any]:
        shown = {name: list(value) if isinstance(value, tuple) else value for name, value in varied.items()}
        try:
            lowered = lower_as_torch(self._table, replace(Settings(), **varied))
        except ValueError as error:
            return {"settings": shown, "refused": str(error)}
        verdicts = [judge(lowered, queues, durations=self._durations) for queues in Queues]
        levels = find_levels(lowered, self._weights, self._gradients)
        return {
            "settings": shown,
            "verdicts": {verdict.queues: verdict.verdict for verdict in verdicts},
            "makespan": {
                each.queues: None if each.verdict in ("dead", "broken") else each.execution.makespan
                for each in verdicts
            },
            **{f"most_{name}": value for name, value in asdict(levels).items()},
            "most_send_bytes": None if self._boundary is None else levels.sends * self._boundary,
            "most_receive_bytes": None if self._boundary is None else levels.receive_buffers * self._boundary,
        }


# --- in words -------------------------------------------------------------------------------------------------


def _tell(answer: dict[str, Any], told: TextIO) -> None:
    print(
        f"{answer['schedule']}: {answer['num_ranks']} ranks, {answer['num_messages']} messages, put there by "
        f"{answer['messages_by']}",
        file=told,
    )
    for verdict in answer["verdicts"]:
        grouped = ", grouped" if verdict["grouped"] else ""
        print(f"  channels={verdict['channels']}{grouped}: {verdict['verdict']}", file=told)
        for each in verdict["cycle"]:
            print(f"    rank {each['rank']} action {each['place']}, {each['action']}: {each['why']}", file=told)
            print(f"      {each['row']}", file=told)
    if "no_times" in answer:
        print(f"  no times: {answer['no_times']}", file=told)
    for row in answer["settings"]:
        name = ", ".join(f"{key}={value}" for key, value in row["settings"].items()) or "torch's own"
        print(f"  {name}: {row['refused'] if 'refused' in row else _line(row, answer['unit'])}", file=told)


def _line(row: dict[str, Any], unit: str) -> str:
    times = ", ".join(
        f"{queues} {row['verdicts'][queues]}" + ("" if time is None else f" {time:.6g} {unit}")
        for queues, time in row["makespan"].items()
    )
    return (
        f"{times}; at most {row['most_sends']} sends under way, {row['most_receive_buffers']} receive buffers, "
        f"{row['most_gathered_stages']} stages gathered"
    )
