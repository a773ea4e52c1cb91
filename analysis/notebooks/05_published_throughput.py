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
# # How fast is RoundPipe where it was measured, and does the simulator see it?
#
# The published measurements on 8 RTX 4090 (figures 10, 11 and 14), and what the simulated bubble predicts of
# them.

# %% tags=["parameters"]
import os
from pathlib import Path

results = Path(os.environ.get("RPBENCH_RESULTS", "results"))

# %%
from analysis.exhibits.figures import prediction, systems
from analysis.exhibits.notebook import say, show
from analysis.records.experiments import Experiments

experiments = Experiments(results)

# %%
show(systems.throughput(experiments))

# %%
show(systems.sequence_length(experiments))

# %%
show(systems.cost(experiments))

# %%
show(prediction.exhibit(experiments))

# %% [markdown]
# ## Answer

# %%
say(
    systems.answer(systems.numbers("throughput", "tokens_per_s")),
    prediction.answer(prediction.numbers(experiments)),
)
