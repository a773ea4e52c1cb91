"""Recovery: stages in processes of their own, one of which may be killed, and training that goes on from a copy."""
