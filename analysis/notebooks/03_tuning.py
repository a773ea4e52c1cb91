# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
#   rpbench:
#     experiments: [figure17, partitions, recompute_ahead, one_round, steady_state]
# ---

# %% [markdown]
# # How much of RoundPipe's lead is left when every schedule has its best cut?
#
# A baseline with an untuned partition is a straw man. Every schedule gets the published cut, layers dealt evenly, the
# released planner's rule, and the cut that simulates best.

# %% tags=["parameters"]
import os
from pathlib import Path

results = os.environ.get("RPBENCH_RESULTS", "results")  # folder of the records
models = ["qwen3_1p7b", "llama31_8b", "gpt_oss_20b", "qwen3_32b", "qwen3_235b_lora"]  # any of them, in any number
rivals = ["gpipe", "1f1b", "interleaved_1f1b", "looped_bfs"]  # whom RoundPipe is compared with
cut = "search"  # of the table: "published", "even", "greedy", "search", "search, recompute ahead", "back to back" ...
down, across, value = "schedule", "model", "bubble"  # its columns

# %%
from analysis.exhibits.figures.own import tuning
from analysis.exhibits.notebook import better_cut, chosen, crossed, judge, picture, rows, say
from analysis.records.experiments import Experiments

experiments = Experiments(Path(results))

# %% [markdown]
# ## Bubbles by schedule and cut
#
# A row of the frame is a run: a model, a schedule, a cut.

# %%
runs = chosen(tuning.numbers(experiments), model=models, schedule=[*rivals, "roundpipe"])
crossed(chosen(runs, cut=cut), down, across, value).round(2)

# %%
picture(tuning.draw(runs))

# %% [markdown]
# ## The lead over the best of the rivals

# %%
leads = tuning.leads(runs)
leads.drop(columns="run_ids").round(4)

# %% [markdown]
# ## RoundPipe's plans

# %%
found = {(model, cut): row for (model, cut), row in tuning.plans_numbers(experiments).items() if model in models}
rows(tuning.plans_table(found))

# %% [markdown]
# ## Answer

# %%
say(tuning.answer(runs), tuning.plans_answer(found))

# %% [markdown]
# ## Exercise
#
# The published cut gives each of 1F1B's eight stages four layers of Llama-3.1-8B, and the last stage the head as
# well. Write down a cut of the 32 layers with which a step is shorter. The check simulates it, and says how far the
# search went.

# %% tags=["exercise"]
model, schedule = "llama31_8b", "1f1b"
own_cut = None  # layers of each stage, such as "4-4-4-4-4-4-4-4"

# %% tags=["check"]
judge(better_cut(own_cut, tuning.numbers(experiments), model, schedule))
