"""TorchTitan's stock trainer on the backend: losses are Gloo's, step by step."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from harness import BACKEND, Ranks
from test_examples import EXAMPLES, free_port
from test_launch import finish

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("torchtitan") is None,
        reason="needs TorchTitan: pip install tpu_dist[titan]",
    ),
]

STEPS = 4
PARALLELISM = {
    "FSDP2": ("llama", {}),
    "HSDP": (
        "llama",
        {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 2},
    ),
    "TP and FSDP2": ("llama", {"tensor_parallel_degree": 2}),
    "PP and FSDP2": (
        "llama",
        {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "Interleaved1F1B"},
    ),
    "CP and FSDP2": ("llama", {"context_parallel_degree": 2}),
    "EP and FSDP2": ("mixture_of_experts", {"expert_parallel_degree": 4}),
}
ONE_BATCH = {
    "TP": {"tensor_parallel_degree": 4},
    "PP": {"pipeline_parallel_degree": 4, "pipeline_parallel_schedule": "1F1B"},
    "CP": {"context_parallel_degree": 4},
}
"""What leaves one data-parallel rank, so that losses are those of a single process."""


def all_to_all(outputs, inputs, group=None, async_op=False):
    """torch.distributed.all_to_all for Gloo, which has it for tensors of one size only."""
    received = torch.empty(
        (sum(len(part) for part in outputs), *outputs[0].shape[1:]), dtype=outputs[0].dtype
    )
    sizes = [len(part) for part in outputs], [len(part) for part in inputs]
    dist.all_to_all_single(received, torch.cat(inputs), *sizes, group=group)
    for output, part in zip(outputs, received.split(sizes[0]), strict=True):
        output.copy_(part)


def trainer(me, port, home, backend, arguments):
    """Runs `python -m torchtitan.train` with `arguments`; loss and gradient norm by step."""
    os.environ.update(
        RANK=str(me.rank),
        LOCAL_RANK=str(me.rank),
        WORLD_SIZE=str(me.world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        HF_HOME=home,
        HF_HUB_OFFLINE="1",
    )
    import torchtitan.trainer
    from torchtitan import train
    from torchtitan.components.metrics import MetricsProcessor

    seen = {}

    def log(self, step, loss, largest, norm, *args, **kwargs):
        seen[step] = (float(loss), float(norm))

    sys.argv = ["train", "--module", "titan_configs", f"--backend={backend}", *arguments]
    # Rank 0 sleeps at the end; the others need no such help.
    clock = Mock(wraps=time, sleep=lambda seconds: None)
    with (
        patch.object(MetricsProcessor, "log", log),
        patch.object(torchtitan.trainer, "time", clock),
        patch.object(dist, "all_to_all", all_to_all)
        if backend == "gloo"
        else contextlib.nullcontext(),
    ):
        train.main()
    return seen


class Titan:
    """Runs the trainer, each time on fresh ranks."""

    def __init__(self, directory):
        self.directory = directory
        self._seeds = {}
        self._seen = {}
        spec = importlib.util.spec_from_file_location(
            "titan_assets", EXAMPLES / "torchtitan" / "assets.py"
        )
        assets = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(assets)
        assets.make(directory / "assets")

    def run(self, config, *options, world=4, backend=BACKEND, steps=STEPS, parallelism=None):
        """Loss and gradient norm by step."""
        arguments = [
            f"--config={config}",
            f"--hf_assets_path={self.directory / 'assets'}",
            f"--dataloader.dataset_path={self.directory / 'assets' / 'text'}",
            f"--dump_folder={self.directory / 'outputs'}",
            f"--training.steps={steps}",
            "--checkpoint.enable",
            *(f"--parallelism.{k}={v}" for k, v in (parallelism or {}).items()),
            *options,
        ]
        home = str(self.directory)
        with Ranks(world, init=None) as ranks:
            runs = ranks.values(trainer, free_port(), home, backend, arguments, deadline=200)
        # The last stage of a pipeline has the loss; the others have -1.
        return max(runs, key=lambda run: run[max(run)][0] if run else 0)

    def seed(self, config):
        """The option to start from the same weights, whatever the parallelism."""
        if config not in self._seeds:
            folder = f"seed_{config}"
            # The same weights each time: how far rounding goes depends on them, where a router
            # chooses among experts.
            options = [
                "--checkpoint.create_seed_checkpoint",
                f"--checkpoint.folder={folder}",
                "--debug.seed=0",
            ]
            self.run(config, *options, world=1)
            self._seeds[config] = self.directory / "outputs" / folder / "step-0"
            assert (self._seeds[config] / ".metadata").exists()
        return f"--checkpoint.initial_load_path={self._seeds[config]}"

    def from_seed(self, config, parallelism, world=4, backend=BACKEND):
        """As `run`, from the seed checkpoint; each run is done once."""
        key = (config, *sorted(parallelism.items()), world, backend)
        if key not in self._seen:
            self._seen[key] = self.run(
                config,
                self.seed(config),
                "--checkpoint.interval=1000",
                # New in each run: there is nothing to resume from.
                f"--checkpoint.folder=run{len(self._seen)}",
                world=world,
                backend=backend,
                parallelism=parallelism,
            )
            assert sorted(self._seen[key]) == list(range(1, STEPS + 1))
        return self._seen[key]


@pytest.fixture(scope="module")
def titan(tmp_path_factory):
    """The trainer with its assets and seed checkpoints."""
    return Titan(tmp_path_factory.mktemp("titan"))


def check(found, expected, rtol=2e-5):
    """Compares losses and gradient norms step by step."""
    assert found.keys() == expected.keys()
    for step in expected:
        torch.testing.assert_close(
            torch.tensor(found[step]), torch.tensor(expected[step]), rtol=rtol, atol=1e-6
        )


@pytest.mark.parametrize("name", PARALLELISM)
def test_losses_are_those_of_gloo(titan, name):
    """Four ranks, from one seed checkpoint, with each backend."""
    config, parallelism = PARALLELISM[name]
    found = titan.from_seed(config, parallelism)
    assert found[STEPS][0] < found[1][0]
    check(found, titan.from_seed(config, parallelism, backend="gloo"))


def test_losses_are_those_of_one_process(titan):
    """Where all ranks work on one batch."""
    expected = titan.from_seed("llama", {}, world=1)
    for parallelism in ONE_BATCH.values():
        check(titan.from_seed("llama", parallelism), expected, rtol=2e-4)


def test_checkpoints_resume_and_reshard(titan):
    """Steps 3 and 4 after a stop, sharded as before and sharded otherwise."""
    expected = titan.from_seed("llama", {})
    options = [
        titan.seed("llama"),
        "--checkpoint.interval=2",
        "--checkpoint.no-last_save_model_only",
        "--lr_scheduler.total_steps=4",
    ]
    first = titan.run("llama", *options, "--checkpoint.folder=same", steps=2)
    outputs = titan.directory / "outputs"
    shutil.copytree(outputs / "same", outputs / "hsdp")
    for folder, parallelism, rtol in (
        ("same", {}, 2e-5),
        # Other sums, of which Adam enlarges the rounding.
        ("hsdp", PARALLELISM["HSDP"][1], 2e-4),
    ):
        rest = titan.run(
            "llama", *options, f"--checkpoint.folder={folder}", parallelism=parallelism
        )
        assert sorted(rest) == [3, 4]
        check(first | rest, expected, rtol)


def test_example(titan):
    """`train.sh` under torchrun: every rank's losses, which fall, and the options it takes."""
    command = ["sh", str(EXAMPLES / "torchtitan" / "train.sh"), "--training.steps", "4"]
    child = subprocess.Popen(
        [*command, "--parallelism.tensor_parallel_degree", "2"],
        env={
            **os.environ,
            "TMPDIR": str(titan.directory),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    code, output = finish(child, 200)
    assert code == 0, output
    assert "tp=2" in output, output
    found = dict(re.findall(r"step: +(\d+).*?loss: +([\d.]+)", output))
    assert sorted(found) == ["1", "2", "3", "4"], output
    assert float(found["4"]) < float(found["1"]), output


def test_assets_fit_the_vocabulary(titan):
    """The example's tokenizer has its special tokens and fits TorchTitan's debug models."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(titan.directory / "assets" / "tokenizer.json"))
    assert tokenizer.get_vocab_size() <= 2048
    text = "def f(x):\n    return x\n"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert (titan.directory / "assets" / "text" / "train.jsonl").stat().st_size > 10_000
