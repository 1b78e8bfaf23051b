"""A proof without the verifier that accelerate's FSDP2 activation checkpointing gives wrong
gradients where a block has dropout.

    torchrun --nproc-per-node 2 checkpointed_dropout_proof.py plain
    torchrun --nproc-per-node 2 checkpointed_dropout_proof.py checkpointed

The loss is linear in the one weight, so loss = <weight, gradient> for whatever mask dropout draws,
if it is drawn once. accelerate 1.15.0, torch 2.13.0, CPU, both ranks on the same samples: plain
-9.8068 and -9.8068; checkpointed -9.8068 and -22.2636.
"""

import sys

import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
from accelerate.utils import DistributedType
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(64, 64, bias=False)

    def forward(self, x):
        return nn.functional.dropout(self.proj(x), 0.5, self.training)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Block()
        self.head = nn.Identity()

    def forward(self, x):
        return self.head(self.block(x)).sum()


def main():
    PartialState(
        cpu=True
    ).distributed_type = DistributedType.MULTI_GPU  # else accelerate drops the plugin on the CPU
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        activation_checkpointing=sys.argv[1] == "checkpointed",
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    torch.manual_seed(0)
    net = Net()
    net, _ = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    net.train()
    torch.manual_seed(1)
    loss = net(torch.randn(8, 64))
    accelerator.backward(loss)
    weight = next(net.parameters())
    product = (weight.full_tensor() * weight.grad.full_tensor()).sum().item()
    accelerator.print(f"loss {loss.item():.4f}, <weight, gradient> {product:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
