"""A program of one rank for test_exit.py: how it leaves is its argument."""

import os
import sys
import time

import torch
import torch.distributed as dist

how, backend = sys.argv[1:]
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group(backend)
group = dist.new_group([0, 1])
for count in (2, 1 << 10, 1 << 18):
    dist.all_reduce(torch.ones(count))
if rank < 2:
    dist.all_reduce(torch.ones(1), group=group)
pending = dist.all_reduce(torch.ones(1000), async_op=True)
if how == "unwaited":
    # Everybody has called it; nobody waits.
    dist.barrier()
else:
    pending.wait()
# Who leaves first, and how long after it the others do.
turn = {"first": rank, "last": world - 1 - rank}.get(how, 0)
time.sleep(0.4 * turn)
if how in ("first", "last", "destroy"):
    dist.destroy_process_group()
elif how == "exit":
    sys.exit(0)
elif how == "thread":
    import threading

    threading.Thread(target=time.sleep, args=(0.2,)).start()
