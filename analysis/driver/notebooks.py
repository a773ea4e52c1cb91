"""Notebooks executed headless: percent source in, notebook with outputs out."""

import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jupytext
import nbformat
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat import NotebookNode

from analysis.exhibits.figures.files import OUT
from analysis.records.experiments import MissingRuns

SOURCES = Path(__file__).parents[1] / "notebooks"
_ROOT = Path(__file__).parents[2]


def notebooks() -> list[Path]:
    """The notebooks, in the order of their names."""
    return sorted(SOURCES.glob("[0-9]*.py"))


def execute(notebook: Path, results: Path, out: Path = OUT / "notebooks", *, timeout_s: int = 300) -> Path:
    """Run a notebook from top to bottom on the records of a results folder, and write it with its outputs.

    Raises:
        MissingRuns: if the notebook needs records that are not there.
        CellExecutionError: if a cell fails for any other reason.
    """
    content = jupytext.read(notebook)
    with TemporaryDirectory(prefix="rpbench-") as private:
        _execute(content, results, Path(private), timeout_s)
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{notebook.stem}.ipynb"
    nbformat.write(content, path)
    return path


def _execute(content: NotebookNode, results: Path, private: Path, timeout_s: int) -> None:
    # Sockets are files in a folder of our own: nothing listens on the network, nothing is written to the home.
    kernel = AsyncKernelManager(
        kernel_name="python3",
        kernel_spec_manager=_ThisPython(),
        transport="ipc",
        connection_file=str(private / "kernel.json"),
        ip=str(private / "kernel"),
    )
    environment = os.environ | {
        "RPBENCH_RESULTS": str(results.resolve()),
        "IPYTHONDIR": str(private),
        "MPLBACKEND": "agg",
    }
    client = NotebookClient(
        content, km=kernel, timeout=timeout_s, record_timing=False, resources={"metadata": {"path": str(_ROOT)}}
    )
    try:
        client.execute(env=environment, cleanup_kc=True)  # or the kernel would live on
    except CellExecutionError as error:
        if error.ename == MissingRuns.__name__:
            raise MissingRuns(error.evalue) from None
        raise


class _ThisPython(KernelSpecManager):
    """Finds one kernel: the Python that runs now, whatever kernels are installed here."""

    def get_kernel_spec(self, kernel_name: str) -> Any:
        command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=command, display_name="Python 3", language="python")
