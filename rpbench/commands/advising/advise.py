"""`advise`: which schedule trains a model fastest on a machine, why, and what would change that."""

import os
import shlex
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from rpbench.advice import model_source
from rpbench.advice.limits import Limit
from rpbench.advice.machine_figures import Described, described
from rpbench.advice.ranking import advise
from rpbench.advice.rows import ALONE, CUT, NONE_RUNS, leads_of, other_orders, space_of
from rpbench.advice.unequal import with_lengths
from rpbench.commands.advising import advise_questions as questions
from rpbench.commands.advising.advise_around import NOTE, around, lengths_asked, timed_again
from rpbench.commands.advising.advise_meshes import OnHost, advise_nodes, beside, on_host
from rpbench.commands.advising.advise_table import table
from rpbench.commands.advising.advise_words import Asked, count_in, framework_in, read_asked, schedules_in, seq_len_in
from rpbench.commands.recorded.explain import print_explanation
from rpbench.config.choices import ConfigError
from rpbench.config.configuration import options_of
from rpbench.config.keys import LAYERS, MOVES, check_figures
from rpbench.config.loading import cluster_file
from rpbench.config.mesh import refuse_frozen, refuse_uneven
from rpbench.cost.hardware.basis import Basis, make_basis
from rpbench.cost.hardware.device import ssds_named
from rpbench.cost.hardware.machine import Machine, devices_named, machine_of
from rpbench.mesh.job import Job
from rpbench.mesh.plan_search.plans import SCHEDULES
from rpbench.mesh.plan_search.search import ORDERS
from rpbench.mesh.plan_search.terms import terms_of
from rpbench.plan.contest.plans import Budget
from rpbench.plan.contest.terms import Terms, default_microbatches
from rpbench.records.provenance import usable_cores
from rpbench.registry import unknown_name
from rpbench.side_processes import in_fork
from rpbench.untrusted import whole
from rpbench.workload.architecture import Architecture

SEQUENCES_PER_DEVICE = 8  # of a step, as in the paper's runs, where nothing else is asked for
ON_HOST = (*LAYERS, *MOVES)  # figures of a machine that searches on one host read
NUM_STEPS = 6  # of which three in the middle count where steps overlap
BUDGET = Budget(work=1_000_000, climb_work=200_000, restarts=8)  # time ends a search, never work
SECONDS = 10.0  # of an answer, on processors that nothing else uses
SEARCHING = 0.62  # of these, for the searches on each processor; the rest: start, compositions, what would change


def advise_on(arguments: Sequence[str], people: TextIO, *, with_around: bool = False) -> dict[str, Any]:
    """The advice as JSON-ready data, its table for `people`; for a page with the rows at other settings, `around`."""
    asked = read_asked(arguments)
    question = questions.question_of(asked.own)
    found, _, _ = _machine(asked), schedules_in(asked), framework_in(asked)
    model, machine = _model(asked), _with_ssd(found.machine, asked)
    asked = replace(asked, lengths=lengths_asked(asked.own, model, machine, question))
    sequences = count_in(asked, "sequences_per_step", len(asked.lengths) or SEQUENCES_PER_DEVICE * machine.size)
    if machine.num_nodes == 1 and question in (None, "compare"):
        told = f"{_seconds(asked):g} s on {usable_cores()} processors, longer while others use them"
        print(f"searching: {told}", file=people, flush=True)
    if question in ("max_seq_len", "batch"):
        answer = _limits(model, machine, asked, question, sequences)
    elif question == "fewest_devices":
        answer = questions.fewest_devices(machine, lambda part: _on(model, part, asked, sequences))
    elif question == "deadline_days":
        answer = questions.rents(machine, asked.own, lambda part: _on(model, part, asked, sequences))
    else:
        answer = _on(model, machine, asked, sequences)
    plans = _plans(answer)
    if answer.get("ranking"):
        answer["leads"] = leads_of(answer["ranking"])
    if with_around and plans and not asked.lengths:
        part = machine.with_devices(answer["num_devices"])
        sizes = default_microbatches(sequences, part.size)
        answer["around"] = around(answer, plans, part, lambda each: _terms(model, each, asked, sequences, sizes)[0])
    answer |= {"assumed": dict(found.assumed), "unused": dict(found.unused), "notes": _notes(asked, machine.num_nodes)}
    width = shutil.get_terminal_size((120, 24)).columns  # COLUMNS, the terminal's, or that of a pipe
    if "limits" in answer:
        lines = questions.limit_lines(answer["limits"], str(question), machine.size)
    else:
        lines = [*questions.question_lines(answer), *table(answer, width, schedules_in(asked) or ())]
    for line in lines:
        print(line, file=people)
    if answer.get("comparison"):
        print_explanation(answer["comparison"], people)
    elif "comparison" in answer:
        print(f"compare={asked.own['compare']}: {_not_compared(answer, asked)}", file=people)
    for note in answer["notes"]:
        print(f"note: {note}", file=people)
    return answer


def _on(model: Architecture, cluster: Machine, asked: Asked, sequences: int) -> dict[str, Any]:
    """Advice on a machine, or on a part of it."""
    on_nodes = cluster.num_nodes > 1
    answer = (_on_nodes if on_nodes else _on_one_host)(model, cluster, asked, sequences)
    if "compare" in asked.own:
        answer["comparison"] = questions.comparison(answer, questions.compared(asked.own), model, cluster)
    return answer


def _not_compared(answer: Mapping[str, Any], asked: Asked) -> str:
    """Why two schedules are not laid beside each other."""
    there = {row["schedule"].partition("(")[0] for row in answer["ranking"]}
    missing = [name for name in questions.compared(asked.own) if name not in there]
    known = [f"{name}: {answer['left_out'][name]}" for name in missing if name in answer["left_out"]]
    rest = [name for name in missing if name not in answer["left_out"]]
    unfit = f"no plan that runs in {asked.own.get('runs_in', 'any framework or here')} and fits"
    return "; ".join([*known, *([f"{' and '.join(rest)}: {unfit}"] if rest else [])])


def _limits(model: Architecture, cluster: Machine, asked: Asked, question: str, sequences: int) -> dict[str, Any]:
    """The longest sequence, or the largest microbatch, of every contender."""
    longest = (model_source.context_in(asked.config) if asked.config else None) or model.context

    def terms_at(value: int) -> Terms:
        if question == "max_seq_len":
            return _terms(replace(model, seq_len=value), cluster, asked, sequences, (1,))[0]
        return _terms(model, cluster, asked, value * cluster.size, (value,))[0]

    names, framework = schedules_in(asked), framework_in(asked)

    def meshes(names: Iterable[str]) -> Iterator[Limit]:
        return questions.mesh_limits(model, cluster, question, names, framework, sequences, longest)

    if cluster.num_nodes > 1:
        _check_meshes(cluster, model, asked, (CUT,))
        limits = meshes(names or (*SCHEDULES, *ALONE.values(), CUT))
    else:
        check_figures(cluster, ON_HOST, "advise")
        own = list(questions.host_limits(terms_at, question, _contenders(names), framework, longest))
        if isinstance(on_host(terms_at(questions.TOKENS), cluster, names, framework, is_plain=True), OnHost):
            composed = meshes(each.name for each in own if each.name in (*SCHEDULES, *ALONE.values()))
            limits = questions.with_compositions(own, {each.name: each for each in composed})
        else:
            limits = iter(own)
    rows = [questions.limit_row(limit, question, terms_at) for limit in limits]
    if not rows:
        raise ConfigError(NONE_RUNS.format(framework))
    key = "seq_len" if question == "max_seq_len" else "microbatch_sequences"
    rows.sort(key=lambda row: (-row[key], -(row["tokens_per_s"] or 0.0)))
    about = {"model": model.name, "cluster": cluster.name, "num_devices": cluster.size, "question": question}
    return _runnable(about | {"limits": rows}, model, cluster, asked)


def plan_meshes(arguments: Sequence[str]) -> dict[str, Any]:
    """`plan mesh=search`: the fastest meshes of a model on nodes, as JSON-ready data; ValueError as of `advise_on`, and
    for a machine with unknown links.
    """
    asked = read_asked(arguments)
    if question := questions.question_of(asked.own):
        raise ConfigError(f"{question}={asked.own[question]}: plan has no questions; ask advise with the same words")
    found = _machine(asked).machine
    sequences = count_in(asked, "sequences_per_step", SEQUENCES_PER_DEVICE * found.size)
    answer = _on_nodes(_model(asked), found, asked, sequences)
    _plans(answer)
    return answer


def _plans(answer: dict[str, Any]) -> list[Any]:
    """The plans of an answer's rows, which are no JSON, taken out of them; those on time first."""
    return [row.pop("plan") for name in ("ranking", "ranking_late") for row in answer.get(name, ())]


def _on_nodes(model: Architecture, found: Machine, asked: Asked, sequences: int) -> dict[str, Any]:
    framework, words = framework_in(asked), [f"{name}={value}" for name, value in asked.words().items()]
    compared = questions.compared(asked.own) if "compare" in asked.own else None
    _check_meshes(found, model, asked, (*ORDERS, CUT))
    search = partial(
        advise_nodes, model, found, seq_len=model.seq_len, global_batch=sequences, framework=framework, words=words
    )
    # each of two compared has its own search: the best of one would leave no place for the other
    wanted = [(name,) for name in compared] if compared else [schedules_in(asked)]
    answers = [
        search(space=space_of(names, framework), names=names, others=other_orders(names, framework)) for names in wanted
    ]
    answer = answers[0]
    if compared:
        rows = [row for each in answers for row in each["ranking"][:1]]
        answer["ranking"] = sorted(rows, key=lambda row: -row["tokens_per_s"])
        answer["does_not_fit"] = [row for each in answers for row in each["does_not_fit"]]
        answer["left_out"] = {name: why for each in answers for name, why in each["left_out"].items()}
    return _runnable(answer, model, found, asked)


def _check_meshes(found: Machine, model: Architecture, asked: Asked, further: Sequence[str]) -> None:
    """ConfigError if meshes of this model are not searched on this machine, or a name is no method of such a search.

    `further` are its methods beside those with closed forms.
    """
    if found.gpu is None and not found.rates:
        raise ConfigError(
            f"mesh=search: nobody knows the collectives of cluster={found.name}: take a machine whose devices are "
            "known, such as cluster=dgx_h100 or gpu=l40s, or measure them: rpbench calibrate ranks=2"
        )
    known = (*SCHEDULES, *further, *ALONE.values())
    key = "compare" if "compare" in asked.own else "schedules"
    for name in questions.methods(key, asked.own[key]) if key in asked.own else ():
        if name not in known:
            raise ConfigError(f"{key}={name}: a search over meshes has {', '.join(known)}; name some of these")
    refuse_frozen(model)
    refuse_uneven(found)


def _seconds(asked: Asked) -> float:
    """Of each processor, for the searches on one host."""
    return float(count_in(asked, "seconds", 0)) or SECONDS


# --- the machine ---------------------------------------------------------------------------------------------


def _machine(asked: Asked) -> Described:
    if "gpu" in asked.own:
        return described(asked.own["gpu"], asked.figures)
    name = asked.own["cluster"]
    others = sorted(set(asked.figures) - {"num_devices"})
    if others:
        raise ConfigError(f"{others[0]}=: cluster={name} has it; describe a machine with gpu= to give figures")
    count = whole("num_devices", asked.figures["num_devices"]) if "num_devices" in asked.figures else 0
    cluster = cluster_file(Path(name)) if name.endswith((".yaml", ".yml")) else _shipped(asked)
    if not count and cluster.num_devices is None:
        raise ConfigError(f"num_devices= is missing: cluster={name} does not say how many devices it has")
    if count > (cluster.num_devices or count) and cluster.devices_per_node is None:
        raise ConfigError(f"num_devices={count}: cluster {cluster.name} has {cluster.num_devices}; ask for fewer")
    return Described(cluster.with_devices(count) if count else cluster)


def _with_ssd(cluster: Machine, asked: Asked) -> Machine:
    if "ssd" not in asked.own:
        return cluster
    if cluster.num_nodes > 1:
        raise ConfigError(f"ssd={asked.own['ssd']}: a mesh over nodes keeps nothing in its hosts; leave it out")
    return replace(cluster, ssd=ssds_named(asked.own["ssd"]))


def _shipped(asked: Asked) -> Machine:
    name = asked.own["cluster"]
    if name in options_of("cluster"):
        return asked.request.cluster
    keys = devices_named(name)
    if keys is None:
        raise ConfigError(unknown_name("cluster", name, options_of("cluster")))
    return machine_of(keys)


# --- the model -----------------------------------------------------------------------------------------------


def _model(asked: Asked) -> Architecture:
    name = asked.own.get("model")
    if name is None:
        return model_source.model_of_sizes({"seq_len": str(seq_len_in(asked)), **asked.sizes})
    if asked.config is not None:
        for key, value in asked.sizes.items():
            if key not in model_source.TRAINING:
                raise ConfigError(f"{key}={value}: model={name} has its sizes; leave one of both out")
        own = replace(model_source.architecture_of(asked.config), seq_len=seq_len_in(asked))
        return model_source.trained(own, asked.sizes)
    if name not in options_of("model"):
        raise ConfigError(_no_model(name))
    found = asked.request.model
    if found is None:
        raise ConfigError(f"model={name} has no shape; take one with a shape, such as model=qwen3_1p7b")
    return found


def _notes(asked: Asked, nodes: int) -> list[str]:
    """Assumptions about a config.json, and about frozen weights in 4 bits; what several nodes leave out."""
    found = list(model_source.assumed_in(asked.config)) if asked.config else []
    if asked.sizes.get("training_mode") == "qlora":
        found.append(
            "qlora: frozen weights are counted in 4.127 bits (arXiv 2305.14314); making them 16 again is not timed"
        )
    if nodes > 1 and schedules_in(asked) is None and "compare" not in asked.own:
        orders = ", ".join((*SCHEDULES, *ORDERS))
        found.append(
            f"{nodes} nodes: a search over meshes has {orders} and methods without a pipeline; other orders, and what "
            "moves to the host, are searched on one node"
        )
    return [*found, NOTE] if asked.lengths else found


def _no_model(name: str) -> str:
    if os.path.isdir(name):  # unlike Path.is_dir, it bears a name that is too long
        return f"model={name}: there is no config.json in this folder"
    if "/" in name or name.endswith(".json"):
        return f"model={name}: there is no such config.json or folder with one; nothing is downloaded, fetch it first"
    return unknown_name("model", name, options_of("model"))


# --- one host ------------------------------------------------------------------------------------------------


def _terms(
    model: Architecture, cluster: Machine, asked: Asked, sequences: int, microbatches: Sequence[float] | None = None
) -> tuple[Terms, Basis]:
    """Terms shared by all contenders on one host, and the figures behind them."""
    cost = asked.request.cost
    basis = make_basis(cluster, cost.constants, cost.declared)
    terms = terms_of(
        model,
        cluster,
        basis,
        num_devices=cluster.num_devices or 1,
        sequences_per_step=sequences,
        microbatches=microbatches,
        num_steps=NUM_STEPS,
    )
    return (with_lengths(terms, basis, asked.lengths) if asked.lengths else terms), basis


def _on_one_host(model: Architecture, cluster: Machine, asked: Asked, sequences: int) -> dict[str, Any]:
    check_figures(cluster, ON_HOST, "advise")
    terms, basis = _terms(model, cluster, asked, sequences)
    seconds, processes = _seconds(asked), usable_cores()
    names = questions.compared(asked.own) if "compare" in asked.own else schedules_in(asked)
    meshes = on_host(terms, cluster, names, framework_in(asked), is_plain=not asked.lengths)
    search = partial(
        advise,
        terms,
        basis,
        names=_contenders(names),
        budget=BUDGET,
        processes=processes,
        late=asked.own.get("late") == "yes" or "compare" in asked.own,
        framework=framework_in(asked),
        seconds=SEARCHING * seconds,
    )
    if isinstance(meshes, OnHost):
        with in_fork(partial(meshes.rows, terms, basis, names), apart=processes > 1) as composing:
            found, composed = search(), composing()
    else:
        found, composed = search(), []
    answer = found.plain() | {"seq_len": model.seq_len}
    for name, rows in (("ranking", found.ranking), ("ranking_late", found.ranking_late)):
        answer[name] = [plain | {"plan": row.plan} for plain, row in zip(answer[name], rows, strict=True)]
    if isinstance(meshes, OnHost) and composed:
        answer["ranking"] = beside(answer["ranking"], composed, terms, basis)
        fitting = {row["schedule"] for row in composed}
        for name in ("does_not_fit", "none_found"):
            answer[name] = [row for row in answer[name] if row["schedule"] not in fitting]
        if isinstance(answer["ranking"][0]["plan"], Job):
            answer["levers"] = meshes.levers(answer["ranking"][0]["plan"])
        if any(isinstance(row["plan"], Job) for row in answer["ranking"][:2]):
            answer["order_turns"] = []  # told of two contenders of one host alone
    elif isinstance(meshes, str):
        answer["left_out"]["meshes"] = meshes
    if not answer["ranking"] and not answer["ranking_late"]:
        composition = meshes.least_more(names) if isinstance(meshes, OnHost) else None
        answer |= questions.smallest_change(found.does_not_fit, terms, seconds, composition)
    answer = _runnable(answer, model, cluster, asked)
    return timed_again(answer, asked.own["lengths"], asked.lengths, model, cluster) if asked.lengths else answer


def _contenders(names: Sequence[str] | None) -> Sequence[str] | None:
    """The names (None: all) without ZeRO-1, which one host has in compositions; ConfigError if none is left."""
    found = names and [name for name in names if name != ALONE["optimizer"]]
    if names and not found:
        raise ConfigError(f"schedules={names[0]}: one host has it beside others only; name some, such as zero_1,zero_2")
    return found


def _runnable(answer: dict[str, Any], model: Architecture, cluster: Machine, asked: Asked) -> dict[str, Any]:
    """The answer with commands that run where neither model nor cluster is one of ours."""
    own, words = asked.own, {}
    if asked.config is not None or model.name != own.get("model"):  # a folder may have the name of its model
        words[f"model={model.name}"] = shlex.join(asked.model_words) or questions.spelled_model(model)
    if own.get("cluster") not in options_of("cluster"):
        words[f"cluster={cluster.name}"] = questions.spelled_machine(cluster)
    return questions.respelled(answer, words)
