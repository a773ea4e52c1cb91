"""Trackers: copies of records at W&B; the record on disk stays the source."""

from rpbench.tracking.wandb_run import Mirror, mirror
