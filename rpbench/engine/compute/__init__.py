"""What the devices of a run compute: forward, recomputation and backward of stages."""
