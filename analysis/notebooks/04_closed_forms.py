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
# # When is it right to recompute, and to stream weights?
#
# Two closed forms behind RoundPipe: running a layer's forward again against reloading its activations
# (figure 2), and computing a layer against uploading it (figure 5). Does either conclusion change when FLOPs
# are counted with the true width of the heads?

# %% tags=["parameters"]
import os
from pathlib import Path

results = Path(os.environ.get("RPBENCH_RESULTS", "results"))

# %%
from analysis.exhibits.figures import figure2, figure5
from analysis.exhibits.notebook import say, show
from analysis.records.experiments import Experiments

experiments = Experiments(results)

# %%
show(figure2.exhibit(experiments))

# %%
show(figure5.exhibit(experiments))

# %% [markdown]
# ## Answer

# %%
say(figure2.answer(figure2.numbers(experiments)), figure5.answer(figure5.numbers(experiments)))
