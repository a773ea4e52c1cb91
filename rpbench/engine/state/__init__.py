"""What a training run keeps: weights and their versions, gradients, the optimizer, checkpoints."""
