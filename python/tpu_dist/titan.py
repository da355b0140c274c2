"""TorchTitan's stock trainer on CPU ranks, with this package's backend.

::

    torchrun --nproc-per-node=4 -m torchtitan.train --module tpu_dist.titan \\
        --config llama3.llama3_debugmodel --backend tpu_dist ...

``--config`` takes a model of TorchTitan's and the name of a configuration of it; one of your
own goes through :func:`on_cpu`. What TorchTitan lacks for the CPU comes in by its
extension points: a trainer with a field more, ``backend``, and an override of FlexAttention,
which has no backward pass there.

Install it with ``pip install tpu_dist[titan]``.
"""

from __future__ import annotations

import importlib
import os
import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed import Backend
from torch.distributed.fsdp import FSDPModule
from torch.nn.attention.flex_attention import create_mask

try:
    from torchtitan.config.override import derive, override
    from torchtitan.distributed import ParallelDims
    from torchtitan.models.common.attention import FlexAttention
    from torchtitan.tools import utils
    from torchtitan.trainer import Trainer
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "torchtitan":
        raise
    raise ModuleNotFoundError(
        "tpu_dist.titan needs TorchTitan: pip install tpu_dist[titan]", name=error.name
    ) from error

__all__ = ["CpuAttention", "CpuTrainer", "cpu_attention", "on_cpu"]


class CpuDevice:
    """What TorchTitan asks a device module, answered for the memory of this process."""

    set_device = staticmethod(torch.cpu.set_device)
    synchronize = staticmethod(torch.cpu.synchronize)
    device_count = staticmethod(torch.cpu.device_count)
    is_available = staticmethod(torch.cpu.is_available)

    @staticmethod
    def current_device() -> int:
        """The one device; `torch.cpu` says "cpu", which no barrier takes."""
        return 0

    @staticmethod
    def get_device_name(device: object = None) -> str:
        """The processor's name."""
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
        return "cpu"

    @staticmethod
    def get_device_properties(device: object = None) -> SimpleNamespace:
        """``total_memory``: the host's memory in bytes."""
        pages = os.sysconf("SC_PHYS_PAGES")
        return SimpleNamespace(total_memory=pages * os.sysconf("SC_PAGE_SIZE"))

    @staticmethod
    def memory_stats(device: object = None) -> dict[str, int]:
        """The peak of the process's resident memory in bytes."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {"active_bytes.all.peak": peak, "reserved_bytes.all.peak": peak}

    @staticmethod
    def reset_peak_memory_stats(device: object = None) -> None:
        """The kernel keeps the peak; nothing to do."""

    @staticmethod
    def empty_cache() -> None:
        """Nothing is cached."""


def _use_cpu() -> None:
    """Makes the CPU the device of TorchTitan's modules, which chose one when imported."""
    if utils.device_type == "cpu":
        return
    chosen = utils.device_module
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "torchtitan":
            if getattr(module, "device_module", None) is chosen:
                module.device_module = CpuDevice  # type: ignore[attr-defined]
            if hasattr(module, "device_type"):
                module.device_type = "cpu"  # type: ignore[attr-defined]


class CpuAttention(FlexAttention):
    """FlexAttention's interface on scaled dot product attention, which can go backward.

    The block mask becomes a dense one of shape (batch or 1, heads or 1, queries, keys).
    Context parallelism works as for FlexAttention: queries are local, keys are gathered.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(FlexAttention.Config):
        """As FlexAttention's; what is about its kernels is without effect."""

    def forward(
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        attention_masks: Any,
        score_mod: Callable[..., torch.Tensor] | None = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        out_transform: Callable[..., torch.Tensor] | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Attention of (batch, length, heads, head width) tensors under a block mask."""
        if score_mod is not None or out_transform is not None:
            raise NotImplementedError(
                "score_mod and out_transform of FlexAttention are not supported on the CPU"
            )
        query, key, value = (t.transpose(1, 2) for t in (q_BLNH, k_BLNH, v_BLNH))
        batch, heads = attention_masks.shape[:2]
        dense = create_mask(
            attention_masks.mask_mod,
            batch,
            heads,
            query.shape[2],
            key.shape[2],
            device=str(query.device),
        )
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=dense, scale=scale, enable_gqa=enable_gqa
        )
        return out.transpose(1, 2)


@override(target=FlexAttention.Config, exact=True, description="attention for the CPU")
def cpu_attention(config: FlexAttention.Config) -> CpuAttention.Config:
    """The override, as ``--override.imports`` takes it."""
    # Context parallelism splits masks between blocks; on the CPU nothing else sees their size.
    return derive(config, CpuAttention.Config, block_size=8)


class CpuTrainer(Trainer):
    """TorchTitan's trainer on CPU ranks."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        """The stock configuration and the backend."""

        backend: str = "tpu_dist"
        """Backend of torch.distributed for CPU tensors: tpu_dist, gloo."""

    def __init__(self, config: Config) -> None:
        _use_cpu()
        if not config.compile.enable:
            # TorchTitan compiles attention masks all the same, which takes a CPU minutes.
            torch.compiler.set_stance("force_eager")
        super().__init__(config)
        if config.backend.endswith("gloo"):
            # Gloo has no PREMUL_SUM, which FSDP2 uses otherwise.
            for part in self.model_parts:
                for module in part.modules():
                    if isinstance(module, FSDPModule):
                        module.set_force_sum_reduction_for_comms(True)

    def init_distributed(self) -> ParallelDims:
        """As the base class, with the backend of the configuration."""
        # TorchTitan takes the device's default, which is Gloo for the CPU.
        with patch.dict(Backend.default_device_backend_map, cpu=self.config.backend):
            return super().init_distributed()


def on_cpu(config: Trainer.Config, backend: str = "tpu_dist") -> CpuTrainer.Config:
    """A configuration of TorchTitan, made to train on CPU ranks.

    Args:
        config: A configuration of the stock trainer.
        backend: The backend for CPU tensors.

    Raises:
        TypeError: the configuration is for another trainer.
    """
    if type(config) is not Trainer.Config:
        raise TypeError(
            f"config: expected a configuration of the stock trainer, got {type(config)}"
        )
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    if not config.override.imports:
        config.override.imports = [f"{__name__}.{cpu_attention.__name__}"]
    config.training.disable_cuda_graphs = True
    return CpuTrainer.Config(**values, backend=backend)


def __getattr__(name: str) -> Callable[[], CpuTrainer.Config]:
    """A configuration of TorchTitan's own models, for ``--config model.configuration``."""
    model, _, configuration = name.partition(".")
    if not configuration:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    registry = importlib.import_module(f"torchtitan.models.{model}.config_registry")
    function = getattr(registry, configuration)
    return lambda: on_cpu(function())
