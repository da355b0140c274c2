"""A Ray cluster that looks like hosts of TPU slices; prints what its workers saw, as JSON.

Usage: fake_slice.py SLICES HOSTS CHIPS_A_WORKER [KILL]

The hosts are Ray nodes on this machine, with the resources and labels that Ray gives hosts
of v5p slices: of shape 2x2x1 with one host of four chips, 2x2x2 with two. They join in an
order that is not that of the slice. With KILL the last rank dies in the second step of the
first attempt.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import ray
import ray.train
from ray.cluster_utils import Cluster
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from tpu_dist.ray import TpuDistConfig

ACCELERATOR, CHIPS = "TPU-V5P", 4
VARIABLES = (
    *("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "TPU_WORKER_ID"),
    *("MEGASCALE_NUM_SLICES", "MEGASCALE_SLICE_ID", "MEGASCALE_PORT"),
)


def train(settings):
    """What each worker runs: reports where it is and what it was given."""
    import torch
    import torch.distributed as dist
    from tpu_dist.mesh import init_device_mesh
    from tpu_dist.topology import from_environment

    rank, world = dist.get_rank(), dist.get_world_size()
    context, labels = ray.get_runtime_context(), ray.get_runtime_context().get_node_labels()
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)
    topology = from_environment()
    mesh = None
    if world == topology.device_count:
        mesh = init_device_mesh((world // 2, 2), ("data", "tensor")).mesh.tolist()
    found = {
        "rank": rank,
        "context": ray.train.get_context().get_world_rank(),
        "slice": labels["ray.io/tpu-slice-name"],
        "worker": int(labels["ray.io/tpu-worker-id"]),
        "chips": [int(chip) for chip in context.get_accelerator_ids()["TPU"]],
        "total": total.item(),
        "topology": topology.name,
        "device": str(ray.train.torch.get_device()),
        "mesh": mesh,
        "coordinator": "MEGASCALE_COORDINATOR_ADDRESS" in os.environ,
        **{name: os.environ.get(name) for name in VARIABLES},
    }
    everybody = [None] * world
    dist.all_gather_object(everybody, found)

    checkpoint = ray.train.get_checkpoint()
    start = 0
    if checkpoint is not None:
        with checkpoint.as_directory() as directory:
            start = int((Path(directory) / "step").read_text()) + 1
    for step in range(start, 3):
        if settings["kill"] and start == 0 and step == 1 and rank == world - 1:
            # Ray looks for checkpoints every second or so.
            time.sleep(6)
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()
        with tempfile.TemporaryDirectory() as directory:
            (Path(directory) / "step").write_text(str(step))
            saved = Checkpoint.from_directory(directory) if rank == 0 else None
            ray.train.report({"everybody": everybody, "start": start}, checkpoint=saved)


def main():
    """Starts the cluster, trains, prints."""
    slices, hosts, chips_a_worker = map(int, sys.argv[1:4])
    pod_type, topology = f"v5p-{2 * CHIPS * hosts}", f"2x2x{hosts}"
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 2, "include_dashboard": False},
    )
    try:
        address = 2
        for host in reversed(range(hosts)):
            for number in range(slices):
                name = f"slice-{number}"
                cluster.add_node(
                    num_cpus=CHIPS,
                    node_ip_address=f"127.0.1.{address}",
                    resources={
                        "TPU": CHIPS,
                        f"accelerator_type:{ACCELERATOR}": 1,
                        **({f"TPU-{pod_type}-head": 1} if host == 0 else {}),
                    },
                    labels={
                        "ray.io/tpu-slice-name": name,
                        "ray.io/tpu-worker-id": str(host),
                        "ray.io/tpu-topology": topology,
                        "ray.io/tpu-pod-type": pod_type,
                        "ray.io/accelerator-type": ACCELERATOR,
                    },
                    env_vars={"TPU_NAME": name},
                )
                address += 1
        ray.init(address=cluster.address, log_to_driver=False)
        with tempfile.TemporaryDirectory() as storage:
            result = TorchTrainer(
                train,
                train_loop_config={"kill": len(sys.argv) > 4},
                torch_config=TpuDistConfig(),
                scaling_config=ScalingConfig(
                    num_workers=slices * hosts * CHIPS // chips_a_worker,
                    use_tpu=True,
                    topology=topology,
                    accelerator_type=ACCELERATOR,
                    resources_per_worker={"CPU": 1, "TPU": chips_a_worker},
                ),
                run_config=RunConfig(
                    storage_path=storage, failure_config=FailureConfig(max_failures=1)
                ),
            ).fit()
        print("RESULT " + json.dumps(result.metrics))
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
