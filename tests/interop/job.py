"""A job for torchrun that never imports the backend's package."""

import os
import signal
import sys

import torch
import torch.distributed as dist

backend, task, *rest = sys.argv[1:]
attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
dist.init_process_group(backend)
rank, world = dist.get_rank(), dist.get_world_size()
for count in (1, 1000, 1 << 18):
    tensor = torch.full((count,), float(rank + 1))
    dist.all_reduce(tensor)
    assert tensor[0] == tensor[-1] == world * (world + 1) / 2
if task == "killed once" and attempt == 0 and rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if task == "raises" and rank == 1:
    raise SystemExit(3)
try:
    dist.barrier()
except dist.DistBackendError as error:
    print(f"rank {rank} saw: {error}", flush=True)
    sys.exit(4)
# One write a rank: the outputs of ranks share a pipe.
sys.stdout.write(f"rank {rank} of {world} on {os.uname().nodename} attempt {attempt} done\n")
sys.stdout.flush()
dist.destroy_process_group()
