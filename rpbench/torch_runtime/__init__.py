"""torch's own pipeline runtime: schedules written for it, read from it, and run on it, a process a rank.

tables, lowering               which schedules a table holds, torch's numbers for ours, every message in its place
tables, frameworks, export     what other programs read and write; no torch
request, launch, ranks         a run, under torchrun or on ranks started here
worker, member, stages, shards one rank of it, or contenders side by side, a step each
gathering, outcome             what it measured, as timelines and record fields
launch, diagnosis              which rank is at fault when a run stops
"""
