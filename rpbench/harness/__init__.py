"""One run, from config to record; the only place that knows hydra and wandb."""
