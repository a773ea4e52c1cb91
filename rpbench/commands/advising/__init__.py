"""The verb `advise`: its answer, its further questions, its table and its page."""
