# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
#   rpbench:
#     experiments: [figure17, steady_state, causal]
# ---

# %% [markdown]
# # What do asynchronous steps really leave idle?
#
# The paper's bars called RoundPipe are those of one isolated call with fill and drain set to 0. Here calls follow
# each other without a barrier: how large is the bubble then, what if the head waits for its input, and does the
# bubble predict the throughput that was measured?

# %% tags=["parameters"]
import os
from pathlib import Path

results = os.environ.get("RPBENCH_RESULTS", "results")  # folder of the records
models = ["qwen3_1p7b", "llama31_8b", "gpt_oss_20b", "qwen3_32b", "qwen3_235b_lora"]  # any of them, in any number
counts = [8, 9, 10, 16]  # N, microbatches a call; any of these
estimates = None  # of throughput: "sync", "label", "back to back"
down, across, value = "num_microbatches", "model", "bubble"  # columns of the frame that the table is made of

# %%
from analysis.exhibits.figures.paper import prediction, steady_state
from analysis.exhibits.notebook import bubble_of_calls, chosen, crossed, judge, picture, rows, say
from analysis.records.experiments import Experiments

experiments = Experiments(Path(results))

# %% [markdown]
# ## Calls back to back

# %%
bubbles = chosen(steady_state.numbers(experiments), model=models, num_microbatches=counts)
crossed(bubbles, down, across, value).round(2)

# %%
picture(steady_state.draw(bubbles))
rows(steady_state.tabulate(bubbles))

# %% [markdown]
# ## The head waits for its input

# %%
waits = chosen(steady_state.causal_numbers(experiments), model=models)
waits.drop(columns=["run_id_ahead", "run_id_waits"]).round(3)

# %% [markdown]
# ## Does the bubble predict the throughput of figure 10?

# %%
paces = chosen(prediction.numbers(experiments), model=models)
picture(prediction.draw(paces))
crossed(chosen(paces, estimate=estimates), "estimate", "model", "ratio").round(3)

# %% [markdown]
# ## Answer

# %%
say(steady_state.answer(bubbles), steady_state.causal_answer(waits), prediction.answer(paces))

# %% [markdown]
# ## Exercise
#
# Nobody ran calls of 12 microbatches. What do 60 of them, one behind the other, leave idle on the first of your
# models? Look at N = 8, 9, 10 and 16 above, think of what does not go into eight devices evenly, and write down your
# guess in percent. The check runs the simulation; a percentage point off is right.

# %% tags=["exercise"]
num_microbatches = 12
guess_percent = None  # a number

# %% tags=["check"]
judge(bubble_of_calls(models[0], num_microbatches, guess_percent))
