"""Systems whose weights stream through the devices: jobs, what moves for them, and their lanes."""
