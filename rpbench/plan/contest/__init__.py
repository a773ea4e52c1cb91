"""One search over every dimension for every schedule, on equal terms.

terms       what all contenders share: model, machine, batch, limits, what is charged
contender   a schedule, on time or one step late
space       what of it may be chosen: stages per device, recomputation, microbatch size, prefetch, its own options
frame       an order with all that moves, timed for any cut
search      the best plan of a contender within a budget of timelines
changes     what any single change of a plan would bring
gains       who beats whom, each distinct order once
"""
