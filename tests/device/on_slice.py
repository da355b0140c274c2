"""A program for a virtual slice: says where each rank is, and takes a step of DDP on a mesh."""

import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from tpu_dist.mesh import init_device_mesh
from tpu_dist.topology import from_environment

torch.set_num_threads(1)
dist.init_process_group()
rank, world = dist.get_rank(), dist.get_world_size()
properties = torch.tpu.get_device_properties()
topology = from_environment()
mesh = init_device_mesh((world // 2, 2), ("dp", "tp"))

total = torch.full((3,), rank + 1.0, device="tpu")
dist.all_reduce(total, group=mesh.get_group("tp"))
pair = sum(peer + 1 for peer in mesh["tp"].mesh.tolist())
assert total.tolist() == [pair] * 3, (total, mesh)

torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(4, 2).to("tpu"))
loss = model(torch.full((3, 4), float(rank), device="tpu")).square().mean()
loss.backward()
gradient = model.module.weight.grad.cpu().double()
alone = torch.nn.Linear(4, 2).double()
alone.load_state_dict({name: value.cpu() for name, value in model.module.state_dict().items()})
for peer in range(world):
    values = torch.full((3, 4), float(peer), dtype=torch.float64)
    (alone(values).square().mean() / world).backward()
torch.testing.assert_close(gradient, alone.weight.grad, rtol=1e-5, atol=1e-6)

with dist._time_estimator(dist.group.WORLD, torch.device("tpu")) as estimate:
    dist.all_reduce(torch.ones(1 << 20, device="tpu"))
attributes = properties.attributes
where = (*attributes["coords"], attributes["core_on_chip"], attributes["process_index"])
# One write a rank: the outputs of ranks share a pipe.
sys.stdout.write(
    f"rank {rank} is {properties.name} {' '.join(map(str, where))} "
    f"{properties.total_memory >> 30} GiB, {estimate.estimated_time:.1f} us\n"
)
sys.stdout.flush()
dist.destroy_process_group()
assert os.environ["TPU_DIST_VIRTUAL_SLICE"] == topology.name
