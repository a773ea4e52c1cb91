"""What a schedule is: actions, shapes, partitions, lanes, dependencies, checks. Standard library only."""
