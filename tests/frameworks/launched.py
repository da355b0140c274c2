"""A program for the launchers: names no backend, and says what it found."""

import os
import sys

import torch
import torch.distributed as dist
from tpu_dist.topology import from_environment

topology = from_environment()
dist.init_process_group()
rank, world = dist.get_rank(), dist.get_world_size()
total = torch.tensor([rank + 1.0])
dist.all_reduce(total, op=dist.ReduceOp.SUM)
assert total.item() == world * (world + 1) / 2
backend = dist.group.WORLD._get_backend(torch.device("cpu")).name()
node = os.environ["GROUP_RANK"]
# One write a rank: the outputs of ranks share a pipe.
sys.stdout.write(
    f"rank {rank} of {world} by {backend} on {topology and topology.name} node {node} "
    f"main {__name__} arguments {sys.argv[1:]}\n"
)
sys.stdout.flush()
dist.destroy_process_group()
