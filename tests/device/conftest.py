"""What the tests of the device share."""

import pytest
import torch
from tpu_dist._backend import load


@pytest.fixture(autouse=True)
def _device():
    """Skips without a device; lets no failure of one test reach the next."""
    if not load().device.is_available():
        pytest.skip("needs libtpu with a TPU, or the package lammps-jax-pjrt-cpu")
    torch.manual_seed(0)
    yield
    torch.tpu.synchronize()
