"""The schedules this project proposes or reproduces, one per file."""
