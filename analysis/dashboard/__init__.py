"""The local dashboard: a page on loopback over a folder of records."""
