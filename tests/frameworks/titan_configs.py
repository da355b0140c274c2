"""Small models for TorchTitan's trainer: its debug models with few layers, in float32."""

from __future__ import annotations

import torchtitan.models.llama3.config_registry as llama3
import torchtitan.models.qwen3.config_registry as qwen3
from torchtitan.trainer import Trainer
from tpu_dist.titan import CpuTrainer, on_cpu


def _small(config: Trainer.Config, layers: int) -> CpuTrainer.Config:
    model = config.model_spec.model
    model.layers = model.layers[:layers]
    config.training.seq_len = 32
    config.training.local_batch_size = 2
    config.training.mixed_precision_param = "float32"
    config.activation_checkpoint = None
    config.validator.enable = False
    config.checkpoint.enable = False
    return on_cpu(config)


def llama() -> CpuTrainer.Config:
    """Four layers."""
    return _small(llama3.llama3_debugmodel(), 4)


def mixture_of_experts() -> CpuTrainer.Config:
    """Two layers with experts."""
    return _small(qwen3.qwen3_moe_debug(), 2)
