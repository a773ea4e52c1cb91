"""The processes of a run: started, grouped, watched, diagnosed and ended."""
