"""Questions of `advise` that ask its search several times: two contenders by causes, the longest sequence, the largest
batch, the fewest devices, the cheapest rent for a deadline."""

import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import Any

from rpbench.advice.limits import CHANGING, Limit, More, largest, least_more, limit_of
from rpbench.advice.rows import (
    ALONE,
    CUT,
    RUNS_IN,
    Misfit,
    command_of,
    command_of_mesh,
    contender_runs_in,
    plain_misfit,
    space_of,
)
from rpbench.commands.advising.advise_table import gigabytes, label, lacks
from rpbench.config.choices import ConfigError
from rpbench.cost.hardware.machine import Machine, devices_named, machine
from rpbench.explain.side import DECLARED, Side, Work
from rpbench.explain.split import explain
from rpbench.mesh.ordered_step import parts_of_work
from rpbench.mesh.plan_search.closed_forms import Question
from rpbench.mesh.plan_search.plans import SCHEDULES, SPLIT, Space
from rpbench.mesh.plan_search.search import ORDERS, NothingFits, search
from rpbench.mesh.software import DEFAULT, software
from rpbench.places import file_of
from rpbench.plan.contest.contender import contenders
from rpbench.plan.contest.plans import Tuned
from rpbench.plan.contest.terms import Terms
from rpbench.registry import entry
from rpbench.untrusted import positive
from rpbench.workload.architecture import Architecture, model_keys


def _values(given: Machine) -> dict[str, Any]:
    others = ("ssd", "price_usd_per_hour")  # SSDs are a row's own words, and no run counts the rent
    return {each.name: getattr(given, each.name) for each in fields(given) if each.name not in others}


def spelled_model(given: Architecture) -> str:
    """The words of a model that is not shipped: `model=transformer` and the keys that differ."""
    file = file_of("model", "transformer")
    usual = {each.name: each.default for each in fields(given)} | (dict(model_keys(file)) if file else {})
    changed = {key: value for key, value in asdict(given).items() if value not in (usual[key], ())}
    return spelled("model", "transformer", changed)


def spelled_machine(given: Machine) -> str:
    """The words of a machine that is not shipped: the usual machine of its devices and the keys that differ."""
    base = "local"
    if given.gpu is not None:
        base = given.name if devices_named(given.name) else f"{given.size}x_{given.gpu.name}"
    usual = machine(base)
    same = {"gpu", *(("devices_per_node", "domain") if given.num_nodes == usual.num_nodes == 1 else ())}
    if given.num_nodes == 1 and min(usual.domain or given.size, given.size) == given.domain_devices:
        same.add("domain")
    known = _values(usual)
    changed = {key: value for key, value in _values(given).items() if value != known[key] and key not in same}
    return spelled("cluster", base, changed)


def spelled(group: str, base: str, values: Mapping[str, Any]) -> str:
    """The words of a group: a shipped option and single keys; sources of numbers are left out."""
    words = [word for key, value in values.items() if key != "declared" for word in _words(f"{group}.{key}", value)]
    return " ".join([f"{group}={base}", *words])


def respelled(answer: dict[str, Any], words: Mapping[str, str]) -> dict[str, Any]:
    """The answer with short words in its commands (`model=NAME`) replaced by the words that they stand for."""
    for row in (*answer.get("ranking", ()), *answer.get("ranking_late", ()), *answer.get("limits", ())):
        for key in row.keys() & {"command", "export", "export_note"}:
            for short, long in words.items():
                row[key] = row[key] and row[key].replace(f" {short} ", f" {long} ")
            row[key] = row[key] and _once(row[key])
    return answer


def _once(command: str) -> str:
    """A command in which of repeated keys (`++model.seq_len=`) only the last is left."""
    words = command.split(" ")
    last = {word.partition("=")[0]: place for place, word in enumerate(words)}
    return " ".join(
        word for place, word in enumerate(words) if not word.startswith("++") or last[word.partition("=")[0]] == place
    )


def _words(key: str, value: Any) -> list[str]:
    """The words of a command line that set a key."""
    if isinstance(value, Mapping):
        return [word for name, each in value.items() for word in _words(f"{key}.{name}", each)]
    if isinstance(value, tuple):
        return [shlex.quote(f"++{key}=[{','.join('null' if each is None else str(each) for each in value)}]")]
    if isinstance(value, str) and not re.fullmatch(r"\w+", value):
        value = '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return [shlex.quote(f"++{key}={'null' if value is None else value}")]


QUESTIONS = ("compare", "max_seq_len", "batch", "fewest_devices", "deadline_days")
BESIDES = ("tokens", "usd_per_device_hour")  # further keys of deadline_days
INSTEAD = {"max_seq_len": "; one length is seq_len=N", "fewest_devices": "; a number of them is num_devices=N"}
ALSO = {"fsdp": "zero_3", "ddp": "data_parallel"}  # common names
TOKENS, LONGEST = 64, 1 << 20  # lengths of sequences are multiples of 64 tokens, up to a million
WIDEST = 4096  # sequences of a microbatch
COMPOSED = (*SCHEDULES, *ORDERS, *ALONE.values(), CUT)  # methods that meshes have as well
HOURS_A_DAY = 24.0


def question_of(own: Mapping[str, str]) -> str | None:
    """The question among the words, None for plain advice; ConfigError for two questions, or an invalid value."""
    asked = [name for name in QUESTIONS if name in own and own[name] != "no"]
    if len(asked) > 1:
        raise ConfigError(f"{asked[0]}= and {asked[1]}=: one question at a time; leave one out")
    for name in ("max_seq_len", "fewest_devices"):
        if own.get(name, "yes") not in ("yes", "no"):
            raise ConfigError(f"{name}={own[name]}: yes or no{INSTEAD[name]}")
    for name in BESIDES:
        if name in own and "deadline_days" not in own:
            raise ConfigError(f"{name}={own[name]}: it belongs to a deadline; add deadline_days=, such as 30")
    if "deadline_days" in own and "tokens" not in own:
        raise ConfigError("tokens= is missing: how many are to be trained on until the deadline, such as tokens=1e9")
    if asked == ["compare"]:
        compared(own)
    return asked[0] if asked else None


def methods(key: str, text: str) -> tuple[str, ...]:
    """The methods that a key names, with commas between; ConfigError for an unknown one."""
    names = tuple(ALSO.get(name, name) for name in text.split(","))
    if "" in names:
        raise ConfigError(f"{key}={text}: names with a comma between two, such as {key}=1f1b,zb_v")
    for name in names:
        if name not in ALONE.values():
            entry(name)  # refuses an unknown name
    return names


def compared(own: Mapping[str, str]) -> tuple[str, str]:
    """The schedules of `compare=A,B`; ConfigError for other than two names."""
    names = methods("compare", own["compare"])
    if len(names) != 2 or names[0] == names[1]:
        raise ConfigError(f"compare={own['compare']}: two schedules with a comma between, as in compare=fsdp,roundpipe")
    if "schedules" in own:
        raise ConfigError(f"schedules={own['schedules']}: compare= names the schedules; leave it out")
    return names[0], names[1]


# --- two contenders ------------------------------------------------------------------------------------------


def comparison(answer: Mapping[str, Any], names: tuple[str, str], model: Architecture, machine: Machine) -> Any:
    """The difference between two schedules by causes; None if one has no plan that fits."""
    rows = {row["schedule"].partition("(")[0]: row for row in reversed(answer["ranking"])}
    if not all(name in rows for name in names):
        return None
    first, second = (_side(rows[name], answer, model, machine) for name in names)
    return explain(first, second, "pace").plain()


def _side(row: Mapping[str, Any], answer: Mapping[str, Any], model: Architecture, machine: Machine) -> Side:
    """A row with its causes in device-seconds of a token."""
    each, causes, why = answer["num_devices"] / answer["tokens_per_step"], dict[str, float](), dict(row["why"])
    if "work" in why:  # of a mesh over nodes: layers that run again and exchanges inside layers are in it
        job = row["plan"]
        why |= parts_of_work(job, why.pop("work"), splits=job.schedule in SPLIT and job.mesh.pipeline > 1)
    for name, seconds in why.items():
        cause = DECLARED["cause_of_mesh_term"].get(name, name)
        causes[cause] = causes.get(cause, 0.0) + each * seconds
    work = Work(model.flops_per_token(answer["seq_len"]), machine.matmul_flops_per_s)
    return Side(label(row), sum(causes.values()), "predicted", causes, "predicted", work=work)


# --- limits of a machine -------------------------------------------------------------------------------------


TermsAt = Callable[[int], Terms]  # of a length, or of a microbatch's sequences


def host_limits(
    terms_at: TermsAt, question: str, names: Sequence[str] | None, framework: str | None, longest: int | None
) -> Iterator[Limit]:
    """The limit of every contender on one host that a framework (None: any) runs.

    `names` None: those that a framework runs today. `longest`: tokens that the model has positions for; None: no limit.
    """
    step, most = _steps(question, longest)
    for contender in contenders(names):
        runs = (
            framework in contender_runs_in(contender, terms_at(step))
            if framework
            else names or contender.name in RUNS_IN
        )
        if runs and not contender.fixed:
            yield limit_of(contender, terms_at, step, most)


def _steps(question: str, longest: int | None) -> tuple[int, int]:
    """Step and upper end of a question's values."""
    return (TOKENS, min(LONGEST, longest or LONGEST)) if question == "max_seq_len" else (1, WIDEST)


def mesh_limits(
    model: Architecture,
    machine: Machine,
    question: str,
    names: Iterable[str],
    framework: str | None,
    batch: int,
    longest: int | None,
) -> Iterator[Limit]:
    """The limit of every method's meshes that a framework runs (None: any), on one host of its compositions alone.

    Other arguments as of `host_limits`.
    """
    of_length = question == "max_seq_len"
    for name in names:
        try:
            space = space_of((name,), framework)
        except ValueError:
            continue

        refusal: list[str] = []

        def held(value: int, space: Space = space, refusal: list[str] = refusal) -> Any:
            refusal.clear()
            own = replace(space, sequences=(1 if of_length else value,), alone=machine.num_nodes > 1)
            length, sequences = (value, batch) if of_length else (model.seq_len, value * machine.size)
            try:
                found = search(Question(model, machine, software(DEFAULT), length, sequences), own, 1)
            except NothingFits:
                return None
            except ValueError as error:
                refusal.append(str(error))
                return None
            return found.best[0]

        found = largest(name, held, *_steps(question, longest))
        yield found if found.value else replace(found, why="".join(refusal))  # of the smallest value that was tried


def with_compositions(alone: Iterable[Limit], composed: Mapping[str, Limit]) -> Iterator[Limit]:
    """The larger of two limits of each method on one host. No bound says that a composition does not fit."""
    for limit in alone:
        found = max(limit, composed.get(limit.name, limit), key=lambda each: each.value)
        yield replace(found, is_proven=found.is_proven and limit.name not in COMPOSED)


def limit_row(limit: Limit, question: str, terms_at: TermsAt) -> dict[str, Any]:
    key = "seq_len" if question == "max_seq_len" else "microbatch_sequences"
    row: dict[str, Any] = {"schedule": limit.name, key: limit.value, "beyond": limit.beyond, "proven": limit.is_proven}
    pace = command = None
    if isinstance(limit.found, Tuned):
        pace, command = limit.found.outcome.tokens_per_s, command_of(limit.found, terms_at(limit.value))
        command += f" ++model.seq_len={limit.value}" if key == "seq_len" else ""
    elif limit.found is not None:
        job = limit.found.job
        pace, command = limit.found.tokens_per_s_per_device * job.machine.size, command_of_mesh(job)
    return row | {"tokens_per_s": pace, "command": command, "why": limit.why or None}


def limit_lines(rows: Sequence[Mapping[str, Any]], question: str, devices: int) -> list[str]:
    """The limits for people, the largest first."""
    key = "seq_len" if question == "max_seq_len" else "microbatch_sequences"
    what = "tokens a sequence" if key == "seq_len" else "sequences a device at once"
    found = [f"{what:>26}  {'tokens/s':>10}  schedule"]
    for row in rows:
        beyond = "all that there is" if row["beyond"] is None else f"not {row['beyond']:,}"
        beyond += ", proven" if row["proven"] and row["beyond"] else ""
        pace = "-" if row["tokens_per_s"] is None else f"{row['tokens_per_s']:,.0f}"
        found.append(f"{row[key]:>26,}  {pace:>10}  {row['schedule']} ({row.get('why') or beyond})")
    if key != "seq_len":
        found.append(f"a step of {devices} times as many sequences is the largest without accumulation")
    return found


# --- how many devices ----------------------------------------------------------------------------------------


def counts_of(machine: Machine) -> list[int]:
    """Possible numbers of devices: any up to one node, then whole nodes."""
    each, size = machine.node_devices, machine.size
    return [*range(1, min(each, size) + 1), *range(2 * each, size + 1, each)]


def powers_and_last(counts: Sequence[int]) -> list[int]:
    """The powers of two among ascending numbers, and the largest number."""
    return sorted({count for count in counts if count & (count - 1) == 0} | {counts[-1]})


def fewest_devices(machine: Machine, ask: Callable[[Machine], dict[str, Any]]) -> dict[str, Any]:
    """Advice on as few devices as hold the model, and what fewer lack."""
    fewer: list[dict[str, Any]] = []
    answer: dict[str, Any] = {}
    for count in counts_of(machine):
        try:
            answer = ask(machine.with_devices(count))
        except ValueError as error:
            fewer.append({"num_devices": count, "why": str(error)})
            continue
        if answer["ranking"]:
            return answer | {"fewest_devices": count, "fewer": fewer}
        fewer.append({"num_devices": count, "why": answer.get("smallest_change", "late=yes has plans that fit")})
    if not answer:
        raise ConfigError(fewer[-1]["why"])
    return answer | {"fewest_devices": None, "fewer": fewer}


def rents(machine: Machine, own: Mapping[str, str], ask: Callable[[Machine], dict[str, Any]]) -> dict[str, Any]:
    """Days and dollars for the tokens on several numbers of devices, and the cheapest in time; ConfigError if the price
    of a device is unknown.
    """
    days, tokens = positive("deadline_days", own["deadline_days"]), positive("tokens", own["tokens"])
    if "usd_per_device_hour" in own:
        price = positive("usd_per_device_hour", own["usd_per_device_hour"])
    elif machine.price_usd_per_hour is not None:
        price = machine.price_usd_per_hour / machine.size
    else:
        raise ConfigError(f"usd_per_device_hour= is missing: nobody knows the rent of {machine.name}; give its price")
    machine = replace(machine, price_usd_per_hour=price * machine.size)  # rows say what tokens cost at this price
    counts = powers_and_last(counts_of(machine))
    rows: list[dict[str, Any]] = []
    answers: dict[int, dict[str, Any]] = {}
    for count in counts:
        why = "nothing fits"
        try:
            answer = ask(machine.with_devices(count))
        except ValueError as error:
            answer, why = {"ranking": []}, str(error)
        if not answer["ranking"]:
            rows.append({"num_devices": count, "days": None, "usd": None, "why": why})
            continue
        answers[count], first = answer, answer["ranking"][0]
        needs = tokens / first["tokens_per_day"]
        usd = needs * HOURS_A_DAY * count * price
        rows.append({"num_devices": count, "days": needs, "usd": usd, "why": label(first)})
    timely = [row for row in rows if row["days"] is not None and row["days"] <= days]
    if not answers:
        raise ConfigError(f"deadline_days={own['deadline_days']}: nothing fits on {counts[-1]} devices or fewer")
    best = min(timely, key=lambda row: row["usd"]) if timely else None
    answer = answers[best["num_devices"] if best else max(answers)]
    return answer | {"rents": rows, "cheapest": best, "deadline_days": days, "tokens": tokens}


def _devices(row: Mapping[str, Any]) -> str:
    return f"{row['num_devices']} device{'s' if row['num_devices'] > 1 else ''}"


def question_lines(answer: Mapping[str, Any]) -> list[str]:
    """Lines on a question about numbers of devices, shown before the advice on the chosen number."""
    found = [f"{_devices(row)}: {row['why']}" for row in answer.get("fewer", ())]
    if answer.get("fewest_devices"):
        found.append(f"fewest devices: {answer['fewest_devices']}")
    for row in answer.get("rents", ()):
        told = "" if row["days"] is None else f"{row['days']:,.1f} days, {row['usd']:,.0f} US dollars, "
        found.append(f"{_devices(row)}: {told}{row['why']}")
    if "cheapest" in answer:
        best, days = answer["cheapest"], f"{answer['deadline_days']:g} days"
        found.append(f"cheapest within {days}: {_devices(best)}" if best else f"none within {days}")
    return found


def smallest_change(misfits: Sequence[Misfit], terms: Terms, seconds: float, composed: More | None) -> dict[str, Any]:
    """The least additional memory with which something fits, as a sentence and as data.

    `seconds` are those of all advice; `composed` is enough for a composition.
    """
    found = least_more(misfits, terms, CHANGING * seconds)
    if composed:
        every = sorted([*found, composed], key=lambda more: more.lacks_bytes)
        found = list({more.kind: more for more in reversed(every)}.values())[::-1]  # the least of each kind
    where = {"device_memory_bytes": "each device", "host_memory_bytes": "the host"}
    told = "; or ".join(
        f"with {gigabytes(more.lacks_bytes)} more memory of {where[more.kind]} {more.schedule} fits" for more in found
    )
    if not told:
        least = plain_misfit(misfits[0])  # those that lack least come first
        told = f"no more of one memory is known to be enough; {label(least)} lacks {lacks(least)}"
    told = f"nothing fits with any of the options tried; {told}"
    return {"smallest_change": told, "change": [more._asdict() for more in found]}
