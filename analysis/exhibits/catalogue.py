"""All exhibits of the report: those of the modules in `figures/` and `tables/`."""

from importlib import import_module
from pkgutil import walk_packages

from analysis.exhibits import figures, tables
from analysis.exhibits.exhibit import DECLARED, LISTED, Exhibit
from analysis.records.experiments import Experiments, MissingRuns

for _folder in (figures, tables):
    for _module in walk_packages(_folder.__path__, f"{_folder.__name__}."):
        import_module(_module.name)


def exhibits(experiments: Experiments) -> tuple[list[Exhibit], list[tuple[str, str]]]:
    """The exhibits that the records allow, in the order of the report, and (identity, missing runs) of the others."""
    made, missing = [], []
    for name in DECLARED:
        try:
            made.append(LISTED[name](experiments))
        except MissingRuns as lack:
            missing.append((name, str(lack)))
    return made, missing
