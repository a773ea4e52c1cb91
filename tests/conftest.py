"""Puts this folder on the path, so that the tests of all layers share `nearby`."""
