"""Claims of the paper and of its artifact: its figures, its headline, its planner, and where it contradicts itself."""
