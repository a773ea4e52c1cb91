"""Dependencies: the actions that every action of a schedule waits for."""
