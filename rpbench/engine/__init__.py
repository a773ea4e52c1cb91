"""Schedule x torch modules -> Timeline: the program a schedule stands for, run on real or modelled devices."""
