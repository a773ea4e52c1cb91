"""What every action of a schedule waits for, by the kind of what it moves."""
