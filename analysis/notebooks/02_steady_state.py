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
# # What do asynchronous steps really leave idle?
#
# The paper's bars called RoundPipe are those of one isolated call with fill and drain set to 0. Here calls
# follow each other without a barrier: how large is the bubble then, and what if the head waits for its input?

# %% tags=["parameters"]
import os
from pathlib import Path

results = Path(os.environ.get("RPBENCH_RESULTS", "results"))

# %%
from analysis.exhibits.figures import steady_state
from analysis.exhibits.notebook import say, show
from analysis.exhibits.tables import causal
from analysis.records.experiments import Experiments

experiments = Experiments(results)

# %%
show(steady_state.exhibit(experiments))

# %%
show(causal.exhibit(experiments))

# %% [markdown]
# ## Answer

# %%
say(steady_state.answer(steady_state.numbers(experiments)), causal.answer(causal.numbers(experiments)))
