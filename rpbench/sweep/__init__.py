"""Many runs: the cells of a multirun, shared by workers under any launcher."""
