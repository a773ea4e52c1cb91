"""What RoundPipe is compared with: one method per file; README.md lists paper and ours side by side."""
