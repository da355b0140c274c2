"""A Ray cluster that looks like hosts of TPU slices; prints what jobs on it saw, as JSON.

The hosts are Ray nodes on this machine, with the resources and labels that Ray gives hosts
of TPU slices: two v5p slices of shape 2x2x2, which have two hosts of four chips each, and a
v6e slice of shape 2x2, which is one host. They join in an order that is not the slices'.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
from pathlib import Path

import ray
import ray.train
from ray.cluster_utils import Cluster
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from tpu_dist.ray import TpuDistConfig

CHIPS = 4
"""Of a host."""
V5P, V6E = ("TPU-V5P", "v5p-16", "2x2x2"), ("TPU-V6E", "v6e-4", "2x2")
HOSTS = [("a", V5P, 1), ("b", V5P, 1), ("b", V5P, 0), ("one", V6E, 0), ("a", V5P, 0)]
"""Name and kind of the slice, number of the host."""

JOBS = {
    "two slices": {"kind": V5P, "workers": 4, "chips": 4, "kill": False},
    "two processes a host": {"kind": V5P, "workers": 4, "chips": 2, "kill": True},
    "one process a chip": {"kind": V6E, "workers": 4, "chips": 1, "kill": False},
}
"""Kind of slice, workers, chips of each; whether the last dies in the second step."""

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
            assert len(ray.train.get_all_reported_checkpoints()) == 1
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()
        with tempfile.TemporaryDirectory() as directory:
            (Path(directory) / "step").write_text(str(step))
            saved = Checkpoint.from_directory(directory) if rank == 0 else None
            ray.train.report({"everybody": everybody, "start": start}, checkpoint=saved)


def job(kind, workers, chips, kill):
    """Trains on a part of the cluster; what the last report said."""
    with tempfile.TemporaryDirectory() as storage:
        result = TorchTrainer(
            train,
            train_loop_config={"kill": kill},
            torch_config=TpuDistConfig(),
            scaling_config=ScalingConfig(
                num_workers=workers,
                use_tpu=True,
                topology=kind[2],
                accelerator_type=kind[0],
                resources_per_worker={"CPU": 1, "TPU": chips},
            ),
            run_config=RunConfig(
                storage_path=storage, failure_config=FailureConfig(max_failures=1)
            ),
        ).fit()
    return result.metrics


def main():
    """Starts the cluster, runs the jobs, prints."""
    cluster = Cluster()
    try:
        for number, (name, (accelerator, pod_type, topology), host) in enumerate(HOSTS):
            cluster.add_node(
                num_cpus=CHIPS,
                include_dashboard=False,
                object_store_memory=100 << 20,
                node_ip_address=f"127.0.1.{number + 1}",
                resources={
                    "TPU": CHIPS,
                    f"accelerator_type:{accelerator}": 1,
                    **({f"TPU-{pod_type}-head": 1} if host == 0 else {}),
                },
                labels={
                    "ray.io/tpu-slice-name": name,
                    "ray.io/tpu-worker-id": str(host),
                    "ray.io/tpu-topology": topology,
                    "ray.io/tpu-pod-type": pod_type,
                    "ray.io/accelerator-type": accelerator,
                },
                env_vars={"TPU_NAME": name},
            )
        ray.init(address=cluster.address, log_to_driver=False)
        print("RESULT " + json.dumps({name: job(**what) for name, what in JOBS.items()}))
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
