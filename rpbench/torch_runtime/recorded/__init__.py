"""What ranks recorded: gathered on one clock, replayed, and compared with plain training."""
