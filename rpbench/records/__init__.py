"""What is kept of runs: records and manifests, written atomically, read and described."""
