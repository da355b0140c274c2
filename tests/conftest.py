"""Set-up of all tests: the module search path and the markers."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))


def pytest_configure(config):
    """Declares the markers these tests use."""
    config.addinivalue_line("markers", "large: needs several GiB of memory")
