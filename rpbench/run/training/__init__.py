"""Inputs of training runs beside the plan: tensors, accelerators, torch's own runtime, validation."""
