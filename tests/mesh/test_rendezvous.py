"""The rendezvous: ranks by place in the slice, otherwise as c10d's; restarts."""

import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters
from tpu_dist import rendezvous


class Agents:
    """Handlers of several hosts in threads of this process, joined over a file store."""

    def __init__(self, path, count, monkeypatch):
        self.path, self.count, self.patch = path, count, monkeypatch
        self.places = [None] * count

    def handler(self, index, **options):
        """The handler of a host; addresses are such that c10d's order is their index."""
        params = RendezvousParameters(
            backend="tpu_dist",
            endpoint=str(self.path),
            run_id="job",
            min_nodes=self.count,
            max_nodes=self.count,
            local_addr=f"127.0.0.{index + 2}",
            store_type="file",
            join_timeout=30,
            **options,
        )
        return rendezvous.get_handler()(params)

    def join(self, handlers, places):
        """All hosts' answers of one round."""
        local = threading.local()
        self.patch.setattr(
            "tpu_dist.topology.position_from_environment", lambda: local.place, raising=True
        )
        answers, errors = [None] * len(handlers), []

        def run(index):
            local.place = places[index]
            try:
                answers[index] = handlers[index].next_rendezvous()
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=run, args=(i,)) for i in range(len(handlers))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
        assert not errors
        assert not any(thread.is_alive() for thread in threads)
        return answers


@pytest.fixture
def agents(tmp_path, monkeypatch):
    return Agents(tmp_path / "store", 4, monkeypatch)


def test_ranks_by_place(agents):
    handlers = [agents.handler(index) for index in range(4)]
    places = [(1, 1), (0, 1), (1, 0), (0, 0)]
    answers = agents.join(handlers, places)
    assert [answer.rank for answer in answers] == [3, 1, 2, 0]
    assert {answer.world_size for answer in answers} == {4}
    # All have the same store, and workers find the same address in it.
    answers[0].store.set("key", "value")
    assert answers[3].store.get("key") == b"value"
    addresses = {
        (a.bootstrap_store_info.master_addr, a.bootstrap_store_info.master_port)
        for a in answers
    }
    assert len(addresses) == 1
    # The next round has the same order and a store of its own.
    again = agents.join(handlers, places)
    assert [answer.rank for answer in again] == [3, 1, 2, 0]
    assert addresses.isdisjoint(
        (a.bootstrap_store_info.master_addr, a.bootstrap_store_info.master_port) for a in again
    )
    assert all(handler.get_backend() == "tpu_dist" for handler in handlers)
    assert {handler.get_run_id() for handler in handlers} == {"job"}
    assert [handler.num_nodes_waiting() for handler in handlers] == [0] * 4
    for handler in handlers:
        assert handler.shutdown()
    assert handlers[0].is_closed()


def test_unknown_places_keep_the_order_of_c10d(agents):
    handlers = [agents.handler(index) for index in range(4)]
    answers = agents.join(handlers, [(0, 3), None, (0, 1), (0, 0)])
    assert [answer.rank for answer in answers] == [0, 1, 2, 3]


def test_address_is_that_of_rank_0_without_shared_store(agents, monkeypatch):
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    handlers = [agents.handler(index) for index in range(4)]
    answers = agents.join(handlers, [(0, 3), (0, 2), (0, 1), (0, 0)])
    assert [answer.rank for answer in answers] == [3, 2, 1, 0]
    assert {answer.bootstrap_store_info.master_addr for answer in answers} == {"127.0.0.5"}


@pytest.mark.parametrize("failures", [0, 1])
def test_torchrun(tmp_path, failures):
    """Two agents whose places are against the order of their names; the second time a worker
    dies in the first round, and all start again in the same order."""
    worker = tmp_path / "worker.py"
    worker.write_text(
        textwrap.dedent(
            f"""
            import os, pathlib, sys
            import torch, torch.distributed as dist
            failed = pathlib.Path({str(tmp_path / "failed")!r})
            if {failures} and os.environ["RANK"] == "3" and not failed.exists():
                failed.touch()
                sys.exit(1)
            dist.init_process_group("gloo")
            rank = torch.tensor([dist.get_rank()])
            dist.all_reduce(rank)
            # One write a line: the workers share a pipe.
            os.write(1, f"RANK {{dist.get_rank()}} WORKER {{os.environ['TPU_WORKER_ID']}} "
                        f"SUM {{rank.item()}}\\n".encode())
            dist.destroy_process_group()
            """
        )
    )
    agents = []
    for name, place in (("127.0.0.2", "1"), ("127.0.0.3", "0")):
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--rdzv-backend", "tpu_dist"),
            *("--rdzv-endpoint", str(tmp_path / "store"), "--rdzv-conf", "store_type=file"),
            *("--rdzv-id", "job", "--nnodes", "2", "--nproc-per-node", "2"),
            *("--max-restarts", "2", "--local-addr", name, str(worker)),
        ]
        environment = {**os.environ, "TPU_WORKER_ID": place, "OMP_NUM_THREADS": "1"}
        agents.append(
            subprocess.Popen(
                command,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                cwd=Path(tmp_path),
            )
        )
    lines = []
    try:
        for agent in agents:
            out, err = agent.communicate(timeout=240)
            assert agent.returncode == 0, err[-3000:]
            lines += [line for line in out.splitlines() if line.startswith("RANK")]
    finally:
        for agent in agents:
            if agent.poll() is None:
                agent.kill()
                agent.communicate()
    expected = [f"RANK {rank} WORKER {rank // 2} SUM 6" for rank in range(4)]
    assert sorted(lines) == expected
