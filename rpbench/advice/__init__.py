"""Advice: which schedule trains a model fastest on a machine, why, and what would change that.

causes            where the seconds of a step go
interval          how far a pace may be off
levers            what a faster link, more memory or another microbatch would bring; what would reverse an order
ranking           every contender searched on equal terms, the fastest first
side_searches     the searches, in several processes: first looks at all contenders, then the most promising
probing           plans of leading contenders, tried for others
whole_layers      the plan of a contender that needs the least memory
published_runs    the runs behind published bars, simulated as schedules
"""
