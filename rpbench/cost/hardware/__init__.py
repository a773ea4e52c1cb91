"""Machines: devices, hosts and links, what they were measured to reach, and where each figure comes from."""
