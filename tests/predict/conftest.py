"""Cases of the published tables on the declared constants."""

from collections.abc import Callable

import pytest

from analysis.predictions.compare import case_of
from rpbench.predict.case import Case


@pytest.fixture(scope="session")
def case() -> Callable[..., Case]:
    """`case("fsdp", "8x_rtx4090", "llama31_8b")`."""
    return case_of
