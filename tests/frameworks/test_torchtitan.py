"""TorchTitan's stock trainer on the backend: losses are Gloo's, step by step."""

from __future__ import annotations

import importlib.util
import os
import sys
from unittest.mock import patch

import pytest
import torch
from harness import BACKEND, Ranks
from test_examples import EXAMPLES, free_port

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


def trainer(me, port, home, arguments):
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
    from torchtitan import train
    from torchtitan.components.metrics import MetricsProcessor

    seen = {}

    def log(self, step, loss, largest, norm, *args, **kwargs):
        seen[step] = (float(loss), float(norm))

    sys.argv = ["train", "--module", "titan_configs", *arguments]
    with patch.object(MetricsProcessor, "log", log):
        train.main()
    return seen


@pytest.fixture(scope="module")
def titan(tmp_path_factory):
    """Runs the trainer on fresh ranks; returns losses and norms."""
    directory = tmp_path_factory.mktemp("titan")
    spec = importlib.util.spec_from_file_location(
        "titan_assets", EXAMPLES / "torchtitan" / "assets.py"
    )
    assets = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(assets)
    assets.make(directory / "assets")

    def run(config, *options, world=4, backend=BACKEND, steps=STEPS, parallelism=None):
        arguments = [
            f"--config={config}",
            f"--backend={backend}",
            f"--hf_assets_path={directory / 'assets'}",
            f"--dataloader.dataset_path={directory / 'assets' / 'text'}",
            f"--dump_folder={directory / 'outputs'}",
            f"--training.steps={steps}",
            *(f"--parallelism.{k}={v}" for k, v in (parallelism or {}).items()),
            *options,
        ]
        with Ranks(world, init=None) as ranks:
            runs = ranks.values(trainer, free_port(), str(directory), arguments, deadline=200)
        # The last stage of a pipeline has the loss; the others have -1.
        return max(runs, key=lambda run: run[max(run)][0] if run else 0)

    run.directory = directory
    return run


def saving(folder):
    """Options that checkpoint every other step."""
    return ["--checkpoint.enable", f"--checkpoint.folder={folder}", "--checkpoint.interval=2"]


@pytest.fixture(scope="module")
def seed(titan):
    """Options that start from the same weights, whatever the parallelism, by model."""
    made = {}

    def options(config):
        if config not in made:
            folder = f"seed_{config}"
            titan(
                config,
                *("--checkpoint.enable", "--checkpoint.create_seed_checkpoint"),
                f"--checkpoint.folder={folder}",
                world=1,
            )
            made[config] = titan.directory / "outputs" / folder / "step-0"
            assert (made[config] / ".metadata").exists()
        return [
            "--checkpoint.enable",
            f"--checkpoint.initial_load_path={made[config]}",
            "--checkpoint.interval=1000",
            # New in each run: there is nothing to resume from.
            f"--checkpoint.folder=none_{free_port()}",
        ]

    return options


def check(found, expected, rtol=2e-5):
    """Compares losses and gradient norms step by step."""
    assert found.keys() == expected.keys()
    for step in expected:
        torch.testing.assert_close(
            torch.tensor(found[step]), torch.tensor(expected[step]), rtol=rtol, atol=1e-6
        )


@pytest.mark.parametrize("name", PARALLELISM)
def test_losses_are_those_of_gloo(titan, seed, name):
    """Four ranks, from one seed checkpoint, with each backend."""
    config, parallelism = PARALLELISM[name]
    found = titan(config, *seed(config), parallelism=parallelism)
    assert sorted(found) == list(range(1, STEPS + 1))
    assert found[STEPS][0] < found[1][0]
    if "expert_parallel_degree" in parallelism:
        # Gloo has no all-to-all with uneven splits: it has all experts on each rank instead.
        parallelism = {}
    check(found, titan(config, *seed(config), parallelism=parallelism, backend="gloo"))


def test_losses_are_those_of_one_process(titan, seed):
    """Where all ranks work on one batch."""
    expected = titan("llama", *seed("llama"), world=1)
    for parallelism in ONE_BATCH.values():
        check(titan("llama", *seed("llama"), parallelism=parallelism), expected, rtol=2e-4)


def test_checkpoints_resume_and_reshard(titan, seed):
    """Steps 3 and 4 after a stop, as sharded before and sharded otherwise."""
    expected = titan("llama", *seed("llama"))
    for folder, parallelism in (
        ("same", {}),
        ("hsdp", {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 2}),
    ):
        options = [*seed("llama")[:2], *saving(folder), "--lr_scheduler.total_steps=4"]
        first = titan("llama", *options, "--checkpoint.no-last_save_model_only", steps=2)
        rest = titan("llama", *options, parallelism=parallelism)
        assert sorted(rest) == [3, 4]
        check(first | rest, expected)


def test_assets_fit_the_vocabulary(titan):
    """The example's tokenizer has its special tokens and fits TorchTitan's debug models."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(titan.directory / "assets" / "tokenizer.json"))
    assert tokenizer.get_vocab_size() <= 2048
    text = "def f(x):\n    return x\n"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert (titan.directory / "assets" / "text" / "train.jsonl").stat().st_size > 10_000
