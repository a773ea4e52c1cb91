"""What tests of `advise` share."""

import io

import pytest
from small_machines import SMALL, TWO_L40S

from rpbench.commands.advising.advise import advise_on


@pytest.fixture(scope="module")
def two_cards():
    """The answer for two devices of one host."""
    return advise_on([*SMALL, *TWO_L40S], io.StringIO())
