"""The documentation site, built by mkdocs: `docs/` with facts and drawings of methods from the registry."""
