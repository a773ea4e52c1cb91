"""Claims of ours: what we say of our experiments, accepted values, and what follows within and beside records."""
