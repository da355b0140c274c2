"""Small models for TorchTitan's trainer: its debug models, smaller still, in float32."""

from __future__ import annotations

import torchtitan.models.llama3.config_registry as llama3
import torchtitan.models.qwen3 as qwen3_models
import torchtitan.models.qwen3.config_registry as qwen3
from torchtitan.trainer import Trainer
from tpu_dist.titan import CpuTrainer, on_cpu


def _small(config: Trainer.Config, layers: int) -> CpuTrainer.Config:
    model = config.model_spec.model
    model.layers = model.layers[:layers]
    config.training.seq_len = 32
    config.training.local_batch_size = 4
    config.training.mixed_precision_param = "float32"
    config.activation_checkpoint = None
    config.validator.enable = False
    config.checkpoint.enable = False
    return on_cpu(config)


def llama() -> CpuTrainer.Config:
    """Four layers."""
    return _small(llama3.llama3_debugmodel(), 4)


def mixture_of_experts() -> CpuTrainer.Config:
    """Two layers with eight experts each, of which a token takes two."""
    config = qwen3.qwen3_moe_debug()
    model = config.model_spec.model
    model.layers = qwen3_models._build_qwen3_moe_layers(
        fuse_qkv=True,
        n_layers=2,
        dim=256,
        n_heads=4,
        n_kv_heads=2,
        head_dim=64,
        moe_hidden_dim=64,
        num_experts=8,
        top_k=2,
        attn_backend="flex",
        rope=qwen3_models.CosSinRoPE.Config(dim=64, max_seq_len=64, theta=1e6),
        moe_comm_backend="standard",
    )
    return _small(config, 2)
