"""Pre-training of a tied-embedding language model, FSDP2 with sharded checkpoints.

    torchrun --nproc-per-node 2 train.py
    torchrun --nproc-per-node 2 train.py --ckpt runs/a --save-every 6
    torchrun --nproc-per-node 2 train.py --ckpt runs/a --resume
"""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

VOCAB, DIM, SEQ = 56, 24, 20


class Block(nn.Module):
    def __init__(self, dim, kernel=4):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.conv = nn.Conv1d(dim, 2 * dim, kernel)
        self.kernel = kernel
        self.norm2 = nn.LayerNorm(dim)
        self.fc1 = nn.Linear(dim, 3 * dim)
        self.fc2 = nn.Linear(3 * dim, dim)

    def forward(self, x):
        h = F.pad(self.norm1(x).transpose(1, 2), (self.kernel - 1, 0))
        a, b = self.conv(h).transpose(1, 2).chunk(2, -1)
        x = x + a * torch.sigmoid(b)
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class LM(nn.Module):
    def __init__(self, layers=3):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Block(DIM) for _ in range(layers))
        self.norm = nn.LayerNorm(DIM)
        self.lm_head = nn.Linear(DIM, VOCAB, bias=False)
        self.tie_weights()

    def tie_weights(self):
        self.lm_head.weight = self.embed.weight

    def init_weights(self):
        for module in self.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        nn.init.normal_(self.embed.weight, std=0.2)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.norm(x))


def build(device, mesh):
    with torch.device("meta"):
        model = LM()
    model.to_empty(device=device)
    model.init_weights()
    model.tie_weights()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


class Text:
    def __init__(self, seed):
        g = torch.Generator().manual_seed(seed)
        self.next = torch.stack([torch.randperm(VOCAB, generator=g) for _ in range(3)])

    def draw(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        cur = torch.randint(0, VOCAB, (n,), generator=g)
        out = [cur]
        for _ in range(SEQ):
            cur = self.next[torch.randint(0, 3, (n,), generator=g), cur]
            out.append(cur)
        out = torch.stack(out, 1)
        return out[:, :-1], out[:, 1:]


class Trainer:
    def __init__(self, args):
        self.args = args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        cuda = torch.cuda.is_available()
        self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
        torch.manual_seed(args.seed)
        self.model = build(self.device, init_device_mesh(self.device.type, (self.world,)))
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.05)
        self.text = Text(args.seed)
        self.step = 0

    def state(self):
        model, optim = get_state_dict(self.model, self.opt)
        return {"model": model, "optim": optim, "step": torch.tensor(self.step)}

    def save(self):
        self.model.reshard()
        dcp.save(self.state(), checkpoint_id=os.path.join(self.args.ckpt, "last"))

    def load(self):
        state = self.state()
        dcp.load(state, checkpoint_id=os.path.join(self.args.ckpt, "last"))
        set_state_dict(self.model, self.opt, model_state_dict=state["model"], optim_state_dict=state["optim"])
        self.step = int(state["step"])

    def lr_now(self):
        a = self.args
        return a.lr * min(1.0, (self.step + 1) / 6)

    def batch(self, n, seed):
        ids, labels = self.text.draw(n, seed)
        cut = slice(self.rank * n // self.world, (self.rank + 1) * n // self.world)
        return ids[cut].to(self.device), labels[cut].to(self.device)

    def loss(self, ids, labels):
        return F.cross_entropy(self.model(ids).flatten(0, 1), labels.flatten())

    def mean(self, x):
        x = x.detach().clone()
        dist.all_reduce(x)
        return x.item() / self.world

    @torch.no_grad()
    def evaluate(self):
        self.model.eval()
        value = self.mean(self.loss(*self.batch(32, 1)))
        self.model.train()
        return value

    def fit(self):
        a = self.args
        while self.step < a.steps:
            for group in self.opt.param_groups:
                group["lr"] = self.lr_now()
            loss = self.loss(*self.batch(a.batch, 100 + self.step))
            loss.backward()
            self.opt.step()
            self.opt.zero_grad()
            self.step += 1
            if self.step % 4 == 0:
                shown = self.mean(loss)
                if self.rank == 0:
                    print(f"{self.step:4d} loss {shown:.6f}", flush=True)
            if a.ckpt and a.save_every and self.step % a.save_every == 0:
                self.save()
        value = self.evaluate()
        self.model.reshard()
        table = self.model.embed.weight.full_tensor().norm().item()
        count = sum(p.numel() for p in self.model.parameters())
        if self.rank == 0:
            print(f"eval {value:.6f} |embed| {table:.6f} parameters {count}")


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=36)
    p.add_argument("--batch", type=int, default=16)
    p.add_argument("--lr", type=float, default=5e-3)
    p.add_argument("--seed", type=int, default=9)
    p.add_argument("--ckpt", default="")
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--resume", action="store_true")
    args = p.parse_args()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    trainer = Trainer(args)
    if args.resume:
        trainer.load()
    trainer.fit()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
