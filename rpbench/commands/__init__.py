"""The verbs of the command line besides running: show, plan, profile, calibrate, compare."""
