"""FSDP1 pre-training of the small GPT: torchrun --nproc-per-node 2 train.py --steps 6 --export out/final.pt"""

import argparse
import functools
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from textdata import LENGTH, VOCAB, batch_of, sequences
from tinygpt import GPT, Block, Config
from torch.distributed.fsdp import (
    BackwardPrefetch,
    FullStateDictConfig,
    FullyShardedDataParallel,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--batch", type=int, default=16)
parser.add_argument("--clip", type=float, default=0.3)
parser.add_argument("--export")
args = parser.parse_args()

dist.init_process_group()
rank, world = dist.get_rank(), dist.get_world_size()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")

torch.manual_seed(5)
model = FullyShardedDataParallel(
    GPT(Config(vocab=VOCAB, length=LENGTH, layers=3)),
    auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}),
    sharding_strategy=ShardingStrategy.FULL_SHARD,
    backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
    limit_all_gathers=True,
    use_orig_params=True,
    device_id=device if device.type == "cuda" else None,
)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)

inputs, targets = sequences(256)
for step in range(args.steps):
    mine = batch_of(step, args.batch, len(inputs)).chunk(world)[rank]
    loss = F.cross_entropy(model(inputs[mine].to(device)).flatten(0, 1), targets[mine].to(device).flatten())
    loss.backward()
    norm = model.clip_grad_norm_(args.clip)
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        print(f"step {step + 1} loss {loss.item():.4f} norm {norm.item():.4f}", flush=True)

if args.export:
    whole = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, whole):
        state = model.state_dict()
    if rank == 0:
        torch.save(state, args.export)
dist.destroy_process_group()
