"""PipeDream's partitioner: stages and their replicas on levels of machines."""
