"""Times where transfers share links and a host's memory: event simulations with fair shares."""
