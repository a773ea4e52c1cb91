"""Exhibits whose figures are judged for every defect of legibility."""

# Made-up records put points of one value on one another; what their figures show is judged on records that were run.
JUDGED = (
    "figure3",
    "figure2",
    "figure5",
    "figure10_published",
    "figure11_published",
    "cost",
    "figure12_predicted",
    "figure14_predicted",
    "figure15_predicted",
    "figure16_predicted",
)
