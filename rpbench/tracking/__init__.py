"""Where records also go. A tracker mirrors; the record on disk is the source."""

from rpbench.tracking.wandb_run import Mirror, begun, mirror
