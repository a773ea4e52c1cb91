"""Our plans in other trainers (`python -m tests.trainers`): each in an environment that is made and removed."""
