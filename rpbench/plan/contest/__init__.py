"""One search over every dimension for every schedule, on equal terms.

terms         what all contenders share: model, machine, batch, limits, what is charged
contender     a schedule, on time or one step late
space         what of it may be chosen: stages per device, recomputation, microbatch size, prefetch, its own options
frame         an order with all that moves, timed for any cut
frames        the frames of one contender, each made once
shifted_cuts  the cuts near a cut
plans         what a search has tried, what it found, what it may spend
search        the best plan of a contender within a budget of timelines
changes       what any single change of a plan would bring
order_key     which plans are the same order
"""
