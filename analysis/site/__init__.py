"""The documentation site: pages of `docs/`, with facts and drawings of methods from the registry, built by mkdocs."""
