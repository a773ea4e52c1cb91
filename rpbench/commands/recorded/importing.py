"""import: what others measured becomes records or a timeline with evidence `measured elsewhere`."""

import json
from collections.abc import Sequence
from pathlib import Path

from rpbench.config.choices import ConfigError
from rpbench.records import imports, record

_FORMS = ("kineto", "wandb", "csv")
_USAGE = "import kineto|wandb|csv FILE [results_dir=DIR] [out=FILE]"


def import_file(arguments: Sequence[str]) -> list[dict[str, object]]:
    """Read one file; what was made of it, an object for each record or trace.

    Raises:
        ConfigError: for an unknown form or a file that does not fit; nothing is written then.
    """
    words = [item for item in arguments if "=" not in item]
    options = dict(item.partition("=")[::2] for item in arguments if "=" in item)
    if len(words) != 2 or words[0] not in _FORMS or set(options) - {"results_dir", "out"}:
        raise ConfigError(f"import takes one form and one file: {_USAGE}")
    form, path = words[0], Path(words[1])
    text = imports.read_text(path)
    if form == "kineto":
        out = Path(options.get("out", path.with_suffix(".timeline.json")))
        trace = imports.trace_of_kineto(text)
        record.write_atomically(out, json.dumps(trace) + "\n")
        found = imports.summary_of_trace(trace)
        return [{"timeline": str(out), "evidence": imports.MEASURED_ELSEWHERE, **found}]
    rows = imports.records_of_csv(text) if form == "csv" else imports.records_of_wandb(text)
    folder = Path(options.get("results_dir", "results"))
    record.check_writable(folder, "results_dir")
    return [record.write(folder / row["run_id"], row) for row in rows]
