"""Language model whose optimizer steps when enough target tokens have come by, however many micro-batches that takes.

Gradients are sums over tokens (over all ranks too) and are divided by the number of tokens at the step.
Checkpoints are taken every so many micro-batches, also in the middle of a window."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from source import Ragged


class Layer(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.attn = nn.MultiheadAttention(d, 4, batch_first=True, bias=False)
        self.mlp = nn.Sequential(nn.LayerNorm(d), nn.Linear(d, 3 * d), nn.SiLU(), nn.Linear(3 * d, d))

    def forward(self, x, mask):
        h = self.norm(x)
        x = x + self.attn(h, h, h, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(x)


class LM(nn.Module):
    def __init__(self, vocab=32, d=32):
        super().__init__()
        self.tok = nn.Embedding(vocab, d)
        self.pos = nn.Embedding(32, d)
        self.layers = nn.ModuleList([Layer(d), Layer(d)])
        self.out = nn.Linear(d, vocab, bias=False)

    def forward(self, ids):
        t = ids.shape[1]
        h = self.tok(ids) + self.pos.weight[:t]
        mask = torch.ones(t, t, dtype=torch.bool).triu(1)
        for layer in self.layers:
            h = layer(h, mask)
        return self.out(h)


class Run:
    def __init__(self, budget):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(3)
        self.model = LM()
        for layer in self.model.layers:
            fully_shard(layer)
        fully_shard(self.model)
        for m in self.model.modules():
            if isinstance(m, FSDPModule):
                m.set_force_sum_reduction_for_comms(True)
                m.set_gradient_divide_factor(1.0)
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=4e-3, eps=1e-6)
        self.source = Ragged()
        self.budget = budget
        self.tokens = 0
        self.loss_sum = 0.0
        self.updates = 0

    def micro_step(self):
        ids, target = self.source.next()
        self.tokens += int((target >= 0).sum())
        ids, target = ids.chunk(self.world)[self.rank], target.chunk(self.world)[self.rank]
        loss = F.cross_entropy(self.model(ids).flatten(0, 1), target.flatten(), ignore_index=-100, reduction="sum")
        loss.backward()
        loss = loss.detach()
        dist.all_reduce(loss)
        self.loss_sum += loss.item()
        if self.tokens >= self.budget:
            self.update()

    def update(self):
        for p in self.model.parameters():
            p.grad.div_(self.tokens)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.opt.step()
        self.opt.zero_grad()
        self.updates += 1
        if self.rank == 0 and self.updates % 4 == 0:
            print(f"update {self.updates} after {self.source.cursor} micro-batches, {self.tokens} tokens, "
                  f"loss {self.loss_sum / self.tokens:.4f}", flush=True)
        self.tokens, self.loss_sum = 0, 0.0

    def state(self, grads):
        kept = {n: (p.grad if p.grad is not None else torch.zeros_like(p)).detach().clone() for n, p in self.model.named_parameters()}
        # get_state_dict may build the optimizer's state with an empty step, which needs p.grad to be unset
        if not grads:
            self.opt.zero_grad()
        m, o = get_state_dict(self.model, self.opt)
        numbers = torch.tensor([self.source.cursor, self.tokens, self.loss_sum, self.updates], dtype=torch.float64)
        return {"model": m, "opt": o, "grads": kept, "numbers": numbers}

    def save(self, root):
        dcp.save(self.state(True), checkpoint_id=os.path.join(root, f"micro{self.source.cursor:05d}"))

    def load(self, root):
        st = self.state(False)
        dcp.load(st, checkpoint_id=os.path.join(root, sorted(os.listdir(root))[-1]))
        set_state_dict(self.model, self.opt, model_state_dict=st["model"], optim_state_dict=st["opt"])
        cursor, tokens, self.loss_sum, updates = st["numbers"].tolist()
        self.source.cursor, self.tokens, self.updates = int(cursor), int(tokens), int(updates)
        if self.tokens:
            for n, p in self.model.named_parameters():
                p.grad = st["grads"][n]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--updates", type=int, default=14)
    ap.add_argument("--budget", type=int, default=220)
    ap.add_argument("--out")
    ap.add_argument("--save-every", type=int, default=0, help="micro-batches")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    run = Run(args.budget)
    if args.resume:
        run.load(args.resume)
    while run.updates < args.updates:
        run.micro_step()
        if args.save_every and run.source.cursor % args.save_every == 0:
            run.save(args.out)
    full = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in run.model.state_dict().items()}
    if args.export and run.rank == 0:
        torch.save(full, args.export)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
