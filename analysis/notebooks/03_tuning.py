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
# # How much of RoundPipe's lead is left when every schedule has its best cut?
#
# A baseline with an untuned partition is a straw man. Every schedule gets the published cut, layers dealt
# evenly, the released planner's rule, and the cut that simulates best.

# %% tags=["parameters"]
import os
from pathlib import Path

results = Path(os.environ.get("RPBENCH_RESULTS", "results"))

# %%
from analysis.exhibits.figures import tuning
from analysis.exhibits.notebook import say, show
from analysis.exhibits.tables import plans
from analysis.records.experiments import Experiments

experiments = Experiments(results)

# %%
show(tuning.exhibit(experiments))

# %%
show(tuning.lead_exhibit(experiments))

# %%
show(plans.exhibit(experiments))

# %% [markdown]
# ## Answer

# %%
say(tuning.answer(tuning.numbers(experiments)), plans.answer(plans.numbers(experiments)))
