"""Claims of the paper and its artifact: figures, headline, planner, and contradictions between them."""
