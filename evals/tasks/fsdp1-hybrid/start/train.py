"""Tags each token of a sequence; FSDP1 with hybrid sharding: torchrun --nproc-per-node 4 train.py --shard 2"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

LENGTH, VOCAB, TAGS, WIDTH = 12, 50, 5, 40


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(3)
        )
        self.tags = nn.Linear(WIDTH, TAGS)

    def forward(self, words):
        x = self.embed(words)
        for layer in self.layers:
            x = layer(x)
        return self.tags(x)


def corpus(count):
    """The tag of a word depends on it and on the word before."""
    words = torch.randint(0, VOCAB, (count, LENGTH), generator=torch.Generator().manual_seed(2))
    return words, (words + words.roll(1, dims=1)) % TAGS


def build(shard):
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world // shard, shard), mesh_dim_names=("replicate", "shard"))
    return FullyShardedDataParallel(
        Tagger(),
        device_mesh=mesh,
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        auto_wrap_policy=ModuleWrapPolicy({nn.TransformerEncoderLayer}),
        forward_prefetch=True,
        use_orig_params=True,
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch", type=int, default=24, help="over all ranks")
    parser.add_argument("--shard", type=int, default=2, help="ranks that share one copy of the model")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(21)
    model = build(args.shard)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.8)
    words, tags = corpus(288)
    rank, world = dist.get_rank(), dist.get_world_size()
    for step in range(args.steps):
        at = step * args.batch % len(words)
        mine = slice(at + rank * args.batch // world, at + (rank + 1) * args.batch // world)
        loss = F.cross_entropy(model(words[mine]).flatten(0, 1), tags[mine].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"step {step + 1} loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
