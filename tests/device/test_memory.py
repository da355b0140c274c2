"""Memory stays flat, however many operations run."""

import gc
import resource

import torch

OPERATIONS = 100_000


def resident():
    """Bytes of memory that this process has."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def work(count):
    """About `count` operations: new tensors, views, in place, of run-time numbers."""
    x = torch.ones(16, 16, device="tpu")
    for step in range(count // 5):
        y = x * (step + 0.5)
        y[:8].add_(x[8:])
        z = (y.t() + y).sum()
        x.copy_(x)
        x = x.clone().mul_(1.0)
        del y, z
    torch.tpu.synchronize()


def test_memory_is_flat():
    work(2000)
    gc.collect()
    held = torch.tpu.memory_allocated()
    before = resident()
    work(OPERATIONS)
    gc.collect()
    assert torch.tpu.memory_allocated() == held
    # Less than 10 bytes for an operation; each makes a kilobyte.
    assert resident() - before < 10 * OPERATIONS
