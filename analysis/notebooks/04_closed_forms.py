# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
#   rpbench:
#     experiments: [roofline]
# ---

# %% [markdown]
# # When is it right to recompute, and to stream weights?
#
# Two closed forms behind RoundPipe: running a layer's forward again against reloading its activations (figure 2), and
# computing a layer against uploading it (figure 5). Does either conclusion change when FLOPs are counted with the
# true width of the heads?

# %% tags=["parameters"]
import os
from pathlib import Path

results = os.environ.get("RPBENCH_RESULTS", "results")  # folder of the records
models = ["qwen3_1p7b", "llama31_8b", "gpt_oss_20b", "qwen3_32b", "qwen3_235b_lora"]  # any of them, in any number
cluster = "8x_rtx4090"  # of figure 2, also 8x_a800, 8x_rtx5090, 8x_h100; published is the RTX 4090
convention = "corrected"  # of the table of batches: "artifact" or "corrected"

# %%
from analysis.exhibits.figures.paper import figure2, figure5
from analysis.exhibits.notebook import among, chosen, crossed, even_link, judge, picture, rows, say
from analysis.records.experiments import Experiments
from analysis.records.runs import closed_forms

experiments = Experiments(Path(results))
among("cluster", cluster, list(figure5.GPUS))

# %% [markdown]
# ## Figure 2: recompute or reload

# %%
times = chosen(figure2.numbers(experiments, cluster), model=models)
times.filter(regex="model|cluster|ms|ratio").round(2)

# %%
picture(figure2.draw(times))
rows(figure2.tabulate(times))

# %% [markdown]
# ## Figure 5: when streaming weights costs nothing

# %%
batches = chosen(figure5.numbers(experiments), model=models)
picture(figure5.draw(batches))
crossed(chosen(batches, convention=convention), "model", "cluster", "smallest_compute_bound_batch")

# %% [markdown]
# ## Answer

# %%
say(figure2.answer(times), figure5.answer(batches))

# %% [markdown]
# ## Exercise
#
# How fast would the link to host memory of one GPU have to be for reloading a layer's activations to take as long as
# computing them again, on your cluster and the first of your models, in the artifact's count? The link of an RTX 4090
# is taken as 32e9 bytes a second. Two percent off is right.

# %% tags=["exercise"]
link_bytes_per_s = None  # a number

# %% tags=["check"]
records = chosen(closed_forms(experiments, cluster, "artifact"), model=models[0])
judge(even_link(link_bytes_per_s, records.iloc[0]))
