"""One thread per operation: with two, sums are split and the last bits differ from run to run."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread_per_operation():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
