"""Notebooks executed headless: Markdown in, notebook with outputs out.

Starting a kernel takes longer than most notebooks compute, so one kernel runs all of them, each in an empty namespace.
No kernel starts for a notebook whose records are missing.
"""

import os
import sys
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jupytext
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat import NotebookNode, v4
from nbformat import write as write_notebook

from analysis.exhibits.figures.files import OUT
from analysis.records.experiments import Experiments, MissingRuns

SOURCES = Path(__file__).parents[1] / "notebooks"
_ROOT = Path(__file__).parents[2]


def notebooks() -> list[Path]:
    return sorted(SOURCES.glob("[0-9]*.md"))


def needs(content: NotebookNode) -> tuple[str, ...]:
    """The experiments whose records a notebook needs, from its header."""
    return tuple(content.metadata.get("rpbench", {}).get("experiments", ()))


class Kernel(ExitStack):
    """A kernel that starts with the first notebook; these find the folder of records in `RPBENCH_RESULTS`."""

    def __init__(self, results: Path) -> None:
        super().__init__()
        self._results = results
        self._client: NotebookClient | None = None

    def run(self, content: NotebookNode) -> None:
        """Execute a notebook in place, in an empty namespace; CellExecutionError if a cell fails."""
        try:
            if self._client is None:
                self._client = self._started()
            else:
                self._execute(v4.new_notebook(cells=[v4.new_code_cell("%reset -f")]))
            self._execute(content)
        except CellExecutionError:
            raise
        except BaseException:  # the kernel died or hangs: the next notebook gets a new one
            self._client = None
            self.close()
            raise

    def _execute(self, content: NotebookNode) -> None:
        assert self._client is not None
        self._client.nb = content
        self._client.execute(cleanup_kc=False)

    def _started(self) -> NotebookClient:
        # Sockets are files in a private folder: no network ports, no files in the home.
        private = Path(self.enter_context(TemporaryDirectory(prefix="rpbench-")))
        manager = AsyncKernelManager(
            kernel_name="python3",
            kernel_spec_manager=_ThisPython(),
            transport="ipc",
            connection_file=str(private / "kernel.json"),
            ip=str(private / "kernel"),
        )
        own = {"RPBENCH_RESULTS": str(self._results.resolve()), "IPYTHONDIR": str(private), "MPLBACKEND": "agg"}
        client = NotebookClient(
            v4.new_notebook(),
            km=manager,
            timeout=300,  # seconds of one cell
            record_timing=False,
            resources={"metadata": {"path": str(_ROOT)}},
        )
        self.enter_context(client.setup_kernel(env=os.environ | own, cleanup_kc=True))  # ends the kernel
        return client


def execute(notebook: Path, results: Path, out: Path = OUT / "notebooks", kernel: Kernel | None = None) -> Path:
    """Run a notebook on the records of a results folder, by default in a new kernel, and write it with its outputs.

    MissingRuns if the notebook needs missing records, CellExecutionError if a cell fails for any other reason.
    """
    content = jupytext.read(notebook)
    experiments = Experiments(results)
    for experiment in needs(content):
        experiments.cells(experiment)
    with ExitStack() as own:
        running = own.enter_context(Kernel(results)) if kernel is None else kernel
        try:
            running.run(content)
        except CellExecutionError as error:
            if error.ename == MissingRuns.__name__:
                raise MissingRuns(error.evalue) from None
            raise
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{notebook.stem}.ipynb"
    write_notebook(content, path)
    return path


class _ThisPython(KernelSpecManager):
    """Finds one kernel, the running Python, whatever kernels are installed."""

    def get_kernel_spec(self, kernel_name: str) -> Any:
        command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=command, display_name="Python 3", language="python")
