"""What is trained: the description of a transformer, and the readers of it."""
