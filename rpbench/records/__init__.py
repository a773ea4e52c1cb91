"""Records and manifests of runs, written atomically, read and described."""
