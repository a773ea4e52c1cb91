# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
#   rpbench:
#     experiments: []
# ---

# %% [markdown]
# # How fast is RoundPipe where it was measured?
#
# The published measurements: throughput, longest sequence and cost on 8 RTX 4090 (figures 10, 11 and 14) or 8 A800
# (figures 12, 13 and 14), and the speed-ups over the best other system that the abstract states. No record is needed.

# %% tags=["parameters"]
models = ["qwen3_1p7b", "llama31_8b", "gpt_oss_20b", "qwen3_32b", "qwen3_235b_lora"]  # any of them, in any number
platform = "8x-rtx4090-24gb"  # or "8x-a800-80gb-sxm"
systems_shown = None  # None for all, or such as ["megatron-pp", "mobius", "roundpipe"], RoundPipe among them

# %%
from analysis.exhibits.figures.paper import predicted, systems
from analysis.exhibits.notebook import among, chosen, crossed, fair_price, judge, picture, say
from analysis.records.published import PUBLISHED_MODELS, look_up

among("platform", platform, [predicted.RTX4090, predicted.A800])
names = [PUBLISHED_MODELS[model] for model in among("models", models, list(PUBLISHED_MODELS))]

# %% [markdown]
# ## Figures 10 and 12: throughput
#
# A row of the frame is a system and a model; what did not run has a status and no value.

# %%
rates = chosen(systems.numbers("throughput", "tokens_per_s", platform), model=names, system=systems_shown)
crossed(rates, "system", "model", "value").round(0)

# %%
picture(systems.draw(rates, f"tokens/s on {platform}, published; (×) over the best other system of the paper's figure"))

# %% [markdown]
# ## Speed-ups
#
# RoundPipe over the best other system, and what the paper says of it: 1.66, 1.48, 2.16 and 2.16 times on the RTX
# 4090.

# %%
speedups = systems.speedups(rates)
speedups["published"] = [
    look_up("headline", "speedup_over_best_baseline", model=PUBLISHED_MODELS[model], platform=platform).value
    for model in speedups["model"]
]
speedups.round(4)

# %% [markdown]
# ## Figures 11 and 13: the longest sequence

# %%
lengths = chosen(systems.numbers("max_seq_len", "max_seq_len_published_k", platform), model=names, system=systems_shown)
picture(systems.draw(lengths, "longest sequence (1,024 tokens), published; (×) over the best other system"))
crossed(lengths, "system", "model", "value")

# %% [markdown]
# ## Figure 14: the cost of a billion tokens

# %%
costs = chosen(systems.costs(platform), model=names, system=systems_shown)
picture(systems.draw_cost(costs, platform))
crossed(costs, "system", "model", "value").round(2)

# %% [markdown]
# ## Answer

# %%
say(systems.answer(rates), systems.length_answer(lengths), systems.cost_answer(costs))

# %% [markdown]
# ## Exercise
#
# The A800 are faster, and cost more: at which price an hour would eight of them cost as much a token as the eight RTX
# 4090, with RoundPipe on the first of your models? Both paces are in the published tables; the price of the RTX 4090
# server is 2.32 US dollars an hour. Two percent off is right.

# %% tags=["exercise"]
usd_per_hour = None  # a number

# %% tags=["check"]
there = chosen(systems.numbers("throughput", "tokens_per_s", predicted.A800), model=names[0], system="roundpipe")
here = chosen(systems.costs(predicted.RTX4090), model=names[0], system="roundpipe")
judge(fair_price(usd_per_hour, there["value"].iloc[0], here["value"].iloc[0]))
