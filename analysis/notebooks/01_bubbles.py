# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Where does the bubble of each schedule come from?
#
# Five schedules, five models, 8 devices and 16 microbatches, with the timings and cuts of the RoundPipe paper
# (figures 3 and 17): how long do the devices wait, when, and do these numbers agree with the published ones?

# %% tags=["parameters"]
import os
from pathlib import Path

results = Path(os.environ.get("RPBENCH_RESULTS", "results"))

# %%
from analysis.exhibits.figures import figure3, figure17, timelines
from analysis.exhibits.notebook import say, show
from analysis.exhibits.tables import published_cells
from analysis.records.experiments import Experiments

experiments = Experiments(results)

# %%
show(figure17.exhibit(experiments))

# %%
show(figure3.exhibit(experiments))

# %%
show(timelines.exhibit(experiments))

# %%
show(published_cells.exhibit(experiments))

# %% [markdown]
# ## Answer

# %%
say(
    figure17.answer(figure17.numbers(experiments)),
    figure3.answer(figure3.numbers(experiments)),
    published_cells.answer(published_cells.numbers(experiments)),
)
