"""What the tests of this directory use of torch, imported once by the fork server."""

import torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.optim
import torch.distributed.pipelining
import torch.distributed.tensor.experimental
import torch.distributed.tensor.parallel
import torch.nn.parallel  # noqa: F401
