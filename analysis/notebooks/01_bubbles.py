# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
#   rpbench:
#     experiments: [figure17, roofline, steady_state]
# ---

# %% [markdown]
# # Where does the bubble of each schedule come from?
#
# Five schedules, five models, 8 devices and 16 microbatches, with the timings and cuts of the RoundPipe paper
# (figures 3 and 17): how long do the devices wait, when, and do these numbers agree with the published ones?
#
# Change the next cell and run the rest again. None stands for all there are.

# %% tags=["parameters"]
import os
from pathlib import Path

results = os.environ.get("RPBENCH_RESULTS", "results")  # folder of the records
models = ["qwen3_1p7b", "llama31_8b", "gpt_oss_20b", "qwen3_32b", "qwen3_235b_lora"]  # any of them, in any number
schedules = ["gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "roundpipe"]  # of timelines and published cells
bars = None  # of figure 17: schedules by name, "roundpipe-sync", "relabelled", "back to back 8", "back to back 10"
down, across, value = "bar", "model", "total"  # columns of the frame that the table is made of

# %%
from analysis.exhibits.figures import timelines
from analysis.exhibits.figures.paper import figure3, figure17
from analysis.exhibits.notebook import chosen, crossed, judge, picture, say, smallest_step
from analysis.exhibits.tables import published_cells
from analysis.records.experiments import Experiments

experiments = Experiments(Path(results))

# %% [markdown]
# ## Figure 17: fill, switch, drain, intra
#
# A row of the frame is a bar: its parts and their total in percent of devices × makespan, and what is published of
# it.

# %%
bubbles = chosen(figure17.numbers(experiments), model=models, bar=bars)
bubbles.drop(columns=["source", "run_id"]).round(2)

# %%
crossed(bubbles, down, across, value).round(2)

# %%
picture(figure17.draw(bubbles))

# %% [markdown]
# ## Figure 3: interleaved schedules and their ideal

# %%
ideals = chosen(figure3.numbers(experiments), model=models)
picture(figure3.draw(ideals))
crossed(ideals, "bar", "model", "bubble").round(2)

# %% [markdown]
# ## Timelines
#
# White is idle, the pale head of a bar is recomputation.

# %%
shown = chosen(timelines.numbers(experiments), model=models[:1], schedule=schedules)
picture(timelines.draw(shown, experiments.results))

# %% [markdown]
# ## The published cells, number by number

# %%
cells = chosen(published_cells.compared(experiments), model=models, schedule=schedules)
cells.round(4)

# %% [markdown]
# ## Answer

# %%
say(
    figure17.answer(chosen(figure17.numbers(experiments), model=models)),
    figure3.answer(ideals),
    f"{cells['is equal'].mean():.0%} of the numbers above are the published ones to four decimals.",
)

# %% [markdown]
# ## Exercise
#
# RoundPipe's single call idles less than 1F1B with 16 microbatches. Longer steps idle less as well. With how many
# microbatches a step does 1F1B, with eight stages of equal cost, first idle less than RoundPipe's call of 16 does on
# the first of your models? Take the bubble of *RoundPipe-sync* from above and the closed form of 1F1B, (p − 1) / (m +
# p − 1), and write down the smallest number. The check simulates it.

# %% tags=["exercise"]
num_microbatches = None  # a whole number

# %% tags=["check"]
calls = chosen(figure17.numbers(experiments), model=models[:1], bar="roundpipe-sync")
judge(smallest_step(num_microbatches, calls["total"].iloc[0]))
