"""Advice: which schedule trains a model fastest on a machine, why, and what would change that.

causes      where the seconds of a step go
interval    how far a pace may be off
levers      what a faster link, more memory or another microbatch would bring; what would turn an order around
ranking     every contender searched on equal terms, the fastest first
searches    side by side: a first look at every contender, then the most promising to their ends (`side_searches`)
probing     plans of leading contenders, tried for others
published   the runs behind published bars as requests to the simulator of schedules, beside its predictor
"""
