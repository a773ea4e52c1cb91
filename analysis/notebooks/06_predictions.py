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
# # What was predicted of the machines that nobody here has?
#
# Throughput, longest sequence, cost, scaling and length of sequences on 8 RTX 4090 and 8 A800, predicted from the
# shape of the models and the declared figures of the machines (figures 10 to 16), beside what is published. The
# tables of predictions are committed (`python -m analysis.predictions` makes them); no record is needed.

# %% tags=["parameters"]
models = ["qwen3_1p7b", "llama31_8b", "gpt_oss_20b", "qwen3_32b", "qwen3_235b_lora"]  # any of them, in any number
platform = "8x-a800-80gb-sxm"  # of figures 12 and 13; "8x-rtx4090-24gb" makes figures 10 and 11 of them
platforms = ["8x-rtx4090-24gb", "8x-a800-80gb-sxm"]  # of figures 14 and 15
systems = None  # of figures 10 to 13, None for all, such as ["fsdp", "megatron-pp", "roundpipe"]
num_devices = [1, 2, 4, 8]  # of figure 15
seq_len_tokens = None  # of figure 16, such as [512, 4096, 32768]
value = "ratio"  # of the tables: predicted, low, high, known, ratio

# %%
from analysis.exhibits.figures.paper import predicted, predicted_curves
from analysis.exhibits.notebook import among, chosen, crossed, judge, longest_sequence, picture, say
from analysis.records.published import PUBLISHED_MODELS

names = [PUBLISHED_MODELS[model] for model in among("models", models, list(PUBLISHED_MODELS))]
among("platform", platform, [predicted.RTX4090, predicted.A800])

# %% [markdown]
# ## Figures 10 and 12: throughput
#
# A row of the frame is a system and a model on a machine: predicted with its interval, known where it is published.

# %%
rates = chosen(predicted.numbers("throughput", platform), model=names, system=systems)
picture(predicted.draw(rates, f"tokens/s on {platform}"))
crossed(rates, "system", "model", value).round(3)

# %% [markdown]
# ## Figures 11 and 13: the longest sequence

# %%
lengths = chosen(predicted.numbers("max_seq_len", platform), model=names, system=systems)
picture(predicted.draw(lengths, f"longest sequence (1,024 tokens) on {platform}"))
crossed(lengths, "system", "model", value).round(3)

# %% [markdown]
# ## Figure 14: the cost of a billion tokens

# %%
costs = chosen(predicted_curves.costs(), platform=platforms, model=names)
cheapest = predicted_curves.cheapest(costs)
picture(predicted_curves.draw_cost(cheapest))
cheapest.drop(columns=["num_gpus", "status", "model_key"]).round(2)

# %% [markdown]
# ## Figure 15: one to eight devices

# %%
scaling = chosen(predicted_curves.scales(), platform=platforms, model=names, num_gpus=num_devices)
picture(predicted_curves.draw_scaling(scaling))
crossed(chosen(scaling, platform=platforms[0]), "num_gpus", "model", "tokens_per_s").round(0)

# %% [markdown]
# ## Figure 16: the length of sequences

# %%
curve = chosen(predicted_curves.lengths(), seq_len_tokens=seq_len_tokens)
picture(predicted_curves.draw_seqlen(curve))
curve[["seq_len_tokens", "tokens_per_s", "tokens_per_s_low", "tokens_per_s_high"]].round(0)

# %% [markdown]
# ## Answer

# %%
say(
    f"Throughput: {predicted.answer(rates)}",
    f"Longest sequence: {predicted.answer(lengths)}",
    predicted_curves.cost_answer(cheapest),
    predicted_curves.scaling_answer(scaling),
)

# %% [markdown]
# ## Exercise
#
# Longer sequences cost throughput, since attention grows with their length. Which is the longest sequence of figure
# 16 that keeps 90 % of the throughput at 512 tokens?

# %% tags=["exercise"]
fraction = 0.9
longest = None  # tokens

# %% tags=["check"]
judge(longest_sequence(longest, fraction, predicted_curves.lengths()))
