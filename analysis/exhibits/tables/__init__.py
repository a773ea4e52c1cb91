"""Tables, most of them without a figure."""
