"""PyTorch's own test bases and models for DTensor and FSDP, which its wheel ships."""

from __future__ import annotations

import multiprocessing
from unittest import mock

import torch
from harness import BACKEND
from harness.ranks import start_fork_server
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing import assert_close
from torch.testing._internal.common_distributed import MultiProcContinuousTest
from torch.testing._internal.distributed._tensor.common_dtensor import (
    DTensorContinuousTestBase,
    ModelArgs,
    Transformer,
)

# The bases decide at once where tensors are: here on the CPU.
with mock.patch("torch.accelerator.is_available", return_value=False):
    from torch.testing._internal import common_fsdp


class OnBackend:
    """Gives PyTorch's bases the backend, and processes that start fast."""

    world_size = 2

    @classmethod
    def backend_str(cls):
        """The backend of the default group."""
        return BACKEND

    @classmethod
    def device_type(cls):
        """The device of all tensors."""
        return "cpu"

    @classmethod
    def _init_pg(cls, rank, world_size, rdvz_file):
        # The bases' own want an accelerator a rank.
        MultiProcContinuousTest._init_pg.__func__(cls, rank, world_size, rdvz_file)

    @classmethod
    def setUpClass(cls):
        """Ranks come from the fork server, which has imported torch."""
        start_fork_server()
        cls._start_method = multiprocessing.get_start_method(allow_none=True)
        multiprocessing.set_start_method("forkserver", force=True)
        super().setUpClass()

    @classmethod
    def tearDownClass(cls):
        """Leaves the start method as it was."""
        super().tearDownClass()
        multiprocessing.set_start_method(cls._start_method, force=True)


class TestDTensorBase(OnBackend, DTensorContinuousTestBase):
    """DTensorConverter makes every sharding of the arguments of an operator."""

    device_type = "cpu"

    def test_operators_on_every_sharding(self):
        """The whole result is that of the whole arguments."""
        mesh = self.build_device_mesh()
        left, right = torch.randn(12, 3), torch.randn(12, 3)
        self._test_op(mesh, torch.add, left, right)
        self._test_op(mesh, torch.mm, torch.randn(12, 8), torch.randn(8, 12))
        self._test_op(mesh, torch.cat, [left, right], 1)
        self._test_op(mesh, torch.Tensor.softmax, left, 1)
        self._test_op(mesh, torch.where, left > 0, left, right)

    def test_operator_on_a_dtensor(self):
        """Uneven shards, in and out of place."""
        mesh = self.build_device_mesh()
        for placement in (Shard(0), Shard(1), Replicate()):
            tensor = distribute_tensor(torch.randn(7, 5), mesh, [placement])
            self._test_op_on_dtensor(torch.relu, tensor)
            self._test_op_on_dtensor(lambda t: t.sum(1, keepdim=True), tensor)

    def test_transformer_with_tensor_parallelism(self):
        """PyTorch's test transformer, parallelized by its own plan."""
        torch.manual_seed(0)
        arguments = ModelArgs(dropout_p=0.0)
        alone = Transformer(arguments)
        model = Transformer(arguments)
        model.load_state_dict(alone.state_dict())
        for sequence in (False, True):
            parallel = Transformer.parallelize(
                self._copy(model, arguments),
                self.build_device_mesh(),
                sequence,
                local_output_for_attn=True,
            )
            tokens = torch.randint(arguments.vocab_size, (4, arguments.max_seq_len))
            expected, found = alone(tokens), parallel(tokens)
            assert_close(found, expected)
            alone.zero_grad()
            expected.sum().backward()
            found.sum().backward()
            assert_close(parallel.output.weight.grad.full_tensor(), alone.output.weight.grad)

    @staticmethod
    def _copy(model, arguments):
        copy = Transformer(arguments)
        copy.load_state_dict(model.state_dict())
        return copy


class TestFsdpBase(OnBackend, common_fsdp.FSDPTestContinuous):
    """PyTorch's parity check of FSDP with DDP, and its models."""

    def test_transformer_shards_like_one_process(self):
        """`check_sharded_parity` after steps of a transformer with tied weights."""
        torch.manual_seed(42)
        arguments = ModelArgs(dropout_p=0.0)
        alone, model = Transformer(arguments), Transformer(arguments)
        model.load_state_dict(alone.state_dict())
        mesh = init_device_mesh("cpu", (self.world_size,))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        one = torch.optim.SGD(alone.parameters(), lr=0.1)
        other = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            tokens = torch.randint(arguments.vocab_size, (4, arguments.max_seq_len))
            losses = []
            for module, optimizer in ((alone, one), (model, other)):
                optimizer.zero_grad()
                losses.append(module(tokens).square().mean())
                losses[-1].backward()
                optimizer.step()
            assert_close(losses[0], losses[1])
            common_fsdp.check_sharded_parity(self, alone, model)

    def test_fsdp1_trains_like_ddp(self):
        """`_test_fsdp_parity`: losses and parameters, with shared and nested parameters."""
        for model, strategy in (
            (common_fsdp.NestedWrappedModule, ShardingStrategy.FULL_SHARD),
            (common_fsdp.TransformerWithSharedParams, ShardingStrategy.SHARD_GRAD_OP),
            (common_fsdp.TransformerWithSharedParams, ShardingStrategy.NO_SHARD),
        ):
            self._test_fsdp_parity(
                model,
                common_fsdp.FSDPInitMode.RECURSIVE,
                common_fsdp.DEVICEInitMode.DEVICE_BEFORE,
                sharding_strategy=strategy,
                use_orig_params=True,
                device_id=torch.device("cpu"),
            )

    def test_mlp_stack_with_both_parallelisms(self):
        """`MLPStack.parallelize`: tensor parallelism of one rank, FSDP over the others."""
        torch.manual_seed(42)
        alone, model = common_fsdp.MLPStack(8), common_fsdp.MLPStack(8)
        model.load_state_dict(alone.state_dict())
        mesh = init_device_mesh("cpu", (1, self.world_size), mesh_dim_names=("dp", "tp"))
        model.parallelize(mesh["tp"], mesh["dp"], use_activation_checkpointing=False)
        rows = torch.randn(4, 8)
        expected, found = alone(rows).sum(), model(rows).sum()
        assert_close(found, expected)
        expected.backward()
        found.backward()
        for plain, parallel in zip(alone.parameters(), model.parameters(), strict=True):
            assert isinstance(parallel, DTensor)
            assert_close(parallel.grad.full_tensor(), plain.grad)
