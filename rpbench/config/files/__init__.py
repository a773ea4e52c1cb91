"""Files that a request is made of: its sources, those of the user, and the keys of models and clusters."""
