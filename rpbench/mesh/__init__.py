"""Meshes: data, pipeline, tensor, context and expert parallelism together, predicted for any model and machine.

job, layout, placement, software   the question: what runs, how ranks are cut into groups, on which framework
layers                             seconds of one layer
step, data_parallel                seconds of a step, in closed form
exact, ordered_step                the same, simulated by the project's own schedules
memory, parameters                 bytes of each device, by class, and whether they fit
plan_search                        what is best, and what to change where nothing fits
"""
