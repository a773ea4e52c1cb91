"""The cost of a head that waits for its input, which the artifact's simulator does not ask for."""

import pandas as pd

from analysis.exhibits import style
from analysis.exhibits.cells import label, ours, table
from analysis.exhibits.exhibit import Cell, Shown, columns_of, exhibited
from analysis.records import runs
from analysis.records.experiments import Experiments


@exhibited("causal")
def exhibit(experiments: Experiments) -> Shown:
    """The table."""
    data = numbers(experiments)
    columns = columns_of("causal")
    return Shown(table=table(columns, map(_row, data.to_dict("records"))), words={"answer": answer(data)})


def numbers(experiments: Experiments) -> pd.DataFrame:
    """One row a model: `bubble` (%), `makespan_s` and `run_id` of both (`_ahead`, `_waits`), `longer` (%).

    Raises:
        MissingRuns: if a run behind it is not there.
    """
    data = pd.DataFrame({"model": list(runs.MODELS)})
    for name, experiment in (("ahead", "figure17"), ("waits", "causal")):
        rows = runs.of_models(experiments, experiment, schedule=("roundpipe",))
        data[f"bubble_{name}"] = (100 * rows["bubble_makespan"]).to_list()
        data[f"makespan_s_{name}"] = rows["makespan_s"].to_list()
        data[f"run_id_{name}"] = rows["run_id"].to_list()
    return data.assign(longer=100 * (data["makespan_s_waits"] / data["makespan_s_ahead"] - 1))


def answer(data: pd.DataFrame) -> str:
    """The cost of waiting, in a sentence."""
    worst = data.loc[data["longer"].idxmax()]
    return (
        f"Waiting makes it {data['longer'].min():.2f} to {data['longer'].max():.2f} % longer, most for "
        f"{style.model_name(worst['model'])} (bubble {worst['bubble_ahead']:.2f} to "
        f"{worst['bubble_waits']:.2f} %)."
    )


def _row(row: dict) -> tuple[Cell, ...]:
    ahead, waits = row["run_id_ahead"], row["run_id_waits"]
    return (
        label(style.model_name(row["model"])),
        ours(row["bubble_ahead"], ".2f", ahead),
        ours(row["bubble_waits"], ".2f", waits),
        ours(row["makespan_s_ahead"], ".4f", ahead),
        ours(row["makespan_s_waits"], ".4f", waits),
        ours(row["longer"], ".2f", (ahead, waits)),
    )
