"""Mobius's partitioner: stages that stream through the devices in rotation."""
