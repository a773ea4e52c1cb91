"""Meshes: data, pipeline, tensor, context and expert parallelism together, predicted for any model and machine.

gpu, machine                what a device can do, and how devices are joined
measured_machine            a calibrated cluster as such a machine
layout, placement           how ranks are cut into groups, and what bandwidth a group sees
products, attention, kernels, collectives, layer_seconds   seconds of one layer
pipeline, data_parallel     seconds of a step
memory, smallest_change     bytes of each device, by class, and what makes a run fit
closed_forms, closed_bytes, plans, fitting   all plans of a search at once
job, prediction, search     the questions: how long does it take, does it fit, what is best
"""
