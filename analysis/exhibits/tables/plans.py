"""RoundPipe's plans: the published cut, that of the released planner's rule, and the best one found."""

from analysis.exhibits import style
from analysis.exhibits.cells import NOTHING, label, ours, short_cut, table, theirs
from analysis.exhibits.exhibit import Cell, Table, columns_of, exhibit_of
from analysis.records import runs
from analysis.records.experiments import Experiments
from analysis.records.paper import PUBLISHED_MODELS, look_up

CUTS = ("published", "even", "greedy", "search")


def tabulate(found: dict[tuple[str, str], dict]) -> Table:
    """One row a model and cut."""
    columns = columns_of("plans")
    models = [model for model in runs.MODELS if (model, "published") in found]
    return table(columns, (_row(found[model, cut]) for model in models for cut in CUTS))


def numbers(experiments: Experiments) -> dict[tuple[str, str], dict]:
    """RoundPipe's records by model and cut.

    Raises:
        MissingRuns: if one is not there.
    """
    found: dict[tuple[str, str], dict] = {}
    for cut in CUTS:
        rows = runs.calls(experiments, cut, ("roundpipe",))
        found |= {(row["model"], cut): row for row in rows.to_dict("records")}
    return found


def answer(found: dict) -> str:
    """Where the planner's rule departs from the published cut, and what search gains, in a sentence."""

    def stages(model: str, cut: str) -> tuple[int, int]:
        return found[model, cut]["num_stages"], found[model, cut]["num_backward_stages"]

    def bubble(model: str, cut: str) -> float:
        return 100 * found[model, cut]["bubble_makespan"]

    models = dict.fromkeys(model for model, _ in found)
    other = [style.model_name(model) for model in models if stages(model, "greedy") != stages(model, "published")]
    gains = [bubble(model, "published") - bubble(model, "search") for model in models]
    worse = [
        f"{style.model_name(model)} ({cut})"
        for model in models
        for cut in CUTS
        if found[model, "search"]["makespan_s"] > found[model, cut]["makespan_s"]
    ]
    return (
        "The planner's rule gives other stage counts than the published cut for "
        f"{', '.join(other) or 'no model'}. The searched cut idles {min(gains):.2f} to {max(gains):.2f} "
        "percentage points less than the published one"
        + (
            f", but is slower than {', '.join(worse)}."
            if worse
            else " and is never slower than any of the three others."
        )
    )


def _row(row: dict) -> list[Cell]:
    model, cut, run = PUBLISHED_MODELS[row["model"]], row["partition"], row["run_id"]
    share = (row["switch_s"] + row["intra_s"]) / (row["num_devices"] * row["makespan_s"])
    return [
        label(style.model_name(row["model"])),
        label(style.PARTITIONS[cut].name),
        ours(row["num_stages"], ".0f", run),
        ours(row["num_backward_stages"], ".0f", run),
        *(_known_stages(model, cut, direction) for direction in ("forward", "backward")),
        ours(100 * row["bubble_makespan"], ".2f", run),
        ours(100 * share, ".2f", run),
        _known_bubble(model, cut),
        ours(row["num_plans_evaluated"], ",.0f", run),
        Cell(row["partition_layers"], short_cut(row["partition_layers"]), (run,)),
    ]


def _known_stages(model: str, cut: str, direction: str) -> Cell:
    if cut == "published":
        known = look_up("partitions", "num_stages", scheduler="roundpipe", model=model, direction=direction)
    elif cut == "greedy":
        known = look_up("planner", f"{direction}_stages", model=model, memory_cap="none")
    else:
        return NOTHING
    return theirs(known.value, ".0f", known.source)


def _known_bubble(model: str, cut: str) -> Cell:
    if cut == "published":
        known = look_up("bubble", "bubble_ratio_percent", scheduler="roundpipe", model=model)
    elif cut == "greedy":
        known = look_up("planner", "sync_bubble_percent", model=model, memory_cap="none")
    else:
        return NOTHING
    return theirs(known.value, ".2f", known.source)


exhibit = exhibit_of("plans", numbers, tabulate, answer=answer)
