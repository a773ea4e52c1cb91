"""The representation of a schedule: actions, shapes, partitions, lanes, dependencies, checks. Standard library only."""
