"""The documentation site: pages from `docs/`, facts and drawings of methods from the registry, built by mkdocs."""
