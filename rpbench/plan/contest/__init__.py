"""One search over every dimension for every schedule, on equal terms.

terms      model, machine, batch, limits and charges, which all contenders share
contender  a schedule, on time or one step late, and its choices: stages per device, recomputation, microbatch size,
           prefetch, the schedule's own options
plans      the settings a search has tried, the plan it found, its budget
frame      an order with all its transfers, timed for any cut
sketch     cuts timed by their computation alone
bounds     paces that no plan exceeds
trials     the settings and cuts that a search has timed
restarts   climbs from cut to cut, and random restarts
search     the best plan of a contender within a budget of timelines
"""
