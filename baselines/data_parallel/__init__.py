"""Every device works on the whole model: replicas, sharded replicas, and weights that travel."""
