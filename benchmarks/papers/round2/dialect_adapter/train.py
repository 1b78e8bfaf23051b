"""Adapt a frozen language model to a dialect with bottleneck adapters.

    torchrun --nproc-per-node 2 train.py --ckpt runs/dialect --save-every 8
    torchrun --nproc-per-node 2 train.py --ckpt runs/dialect --resume

The base model is trained first on the standard language (short, here in the script). A run
that resumes takes everything from the checkpoint and skips that.
"""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

VOCAB, LENGTH = 30, 16


class Adapter(nn.Module):
    def __init__(self, dim, inner):
        super().__init__()
        self.down, self.up = nn.Linear(dim, inner), nn.Linear(inner, dim)
        nn.init.zeros_(self.up.weight)
        nn.init.zeros_(self.up.bias)

    def forward(self, x):
        return x + self.up(F.gelu(self.down(x)))


class Block(nn.Module):
    def __init__(self, dim, adapter):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.gru = nn.GRU(dim, dim, batch_first=True)
        self.adapter = Adapter(dim, adapter)

    def forward(self, x):
        return self.adapter(x + self.gru(self.norm(x))[0])


class LanguageModel(nn.Module):
    def __init__(self, dim, layers, adapter):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.blocks = nn.ModuleList(Block(dim, adapter) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, VOCAB)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def sentences(batch, index, dialect):
    """Next word: 2 * word + 1 + class of the word before; the dialect shifts the result."""
    g = torch.Generator().manual_seed(40_000 * (1 + dialect) + index)
    ids = torch.randint(0, VOCAB, (batch, LENGTH + 1), generator=g)
    free = torch.rand(ids.shape, generator=g) < 0.1
    for t in range(2, LENGTH + 1):
        word = (2 * ids[:, t - 1] + 1 + ids[:, t - 2] % 2 + 3 * dialect) % VOCAB
        ids[:, t] = torch.where(free[:, t], ids[:, t], word)
    return ids[:, :-1], ids[:, 1:]


def next_word_loss(model, ids, target):
    return F.cross_entropy(model(ids).flatten(0, 1), target.flatten())


def pretrain_base(model, steps=40):
    """Standard language; the same on all ranks, before sharding."""
    opt = torch.optim.AdamW([p for n, p in model.named_parameters() if ".adapter." not in n], lr=1e-2)
    for step in range(steps):
        loss = next_word_loss(model, *sentences(16, step, dialect=0))
        loss.backward()
        opt.step()
        model.zero_grad()


def save(folder, model, opt, step):
    options = StateDictOptions(ignore_frozen_params=False)
    weights, optim = get_state_dict(model, opt, options=options)
    dcp.save({"model": weights, "optim": optim, "step": torch.tensor(step)}, checkpoint_id=folder)


def load(folder, model, opt):
    options = StateDictOptions(ignore_frozen_params=False, strict=False)
    weights, optim = get_state_dict(model, opt, options=options)
    state = {"model": weights, "optim": optim, "step": torch.tensor(0)}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        model, opt, model_state_dict=state["model"], optim_state_dict=state["optim"], options=options
    )
    return int(state["step"])


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--dim", type=int, default=32)
    p.add_argument("--layers", type=int, default=2)
    p.add_argument("--adapter", type=int, default=8)
    p.add_argument("--batch", type=int, default=16)
    p.add_argument("--steps", type=int, default=40)
    p.add_argument("--lr", type=float, default=1e-2)
    p.add_argument("--ckpt")
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--resume", action="store_true")
    args = p.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    mesh = init_device_mesh(device.type, (world,))

    torch.manual_seed(50)
    model = LanguageModel(args.dim, args.layers, args.adapter)
    if not args.resume:
        pretrain_base(model)
    for name, param in model.named_parameters():
        param.requires_grad_(".adapter." in name)
    model.to(device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=args.lr)

    first = load(args.ckpt, model, opt) if args.resume else 0
    n = args.batch // world
    own = slice(rank * n, (rank + 1) * n)
    mine = lambda index: [t[own].to(device) for t in sentences(args.batch, index, dialect=1)]

    def mean(value):
        value = value.detach().clone()
        dist.all_reduce(value)
        return value.item() / world

    for step in range(first, args.steps):
        loss = next_word_loss(model, *mine(step))
        loss.backward()
        opt.step()
        opt.zero_grad()
        if (step + 1) % 4 == 0:
            shown = mean(loss)
            with torch.no_grad():
                held_out = mean(next_word_loss(model, *mine(30_000)))
            if rank == 0:
                print(f"step {step + 1:3d} loss {shown:.5f} held out {held_out:.5f}", flush=True)
        if args.ckpt and args.save_every and (step + 1) % args.save_every == 0:
            save(args.ckpt, model, opt, step + 1)

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
