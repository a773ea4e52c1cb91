"""What training runs take beside the plan: tensors, accelerators, torch's own runtime, validation."""
