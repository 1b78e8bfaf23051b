"""Character model on batches of a fixed token budget. The loss is the mean over the tokens of the global batch,
however they are spread over the ranks; gradients are summed, not averaged."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule, fully_shard

from packing import Documents, TokenBudgetSampler


class CausalConvBlock(nn.Module):
    def __init__(self, dim, dilation):
        super().__init__()
        self.pad = 2 * dilation
        self.norm = nn.LayerNorm(dim)
        self.conv = nn.Conv1d(dim, 2 * dim, 3, dilation=dilation)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x):
        y = self.conv(F.pad(self.norm(x).transpose(1, 2), (self.pad, 0)))
        return x + self.out(F.glu(y, dim=1).transpose(1, 2))


class CharModel(nn.Module):
    def __init__(self, vocab, dim=24):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(CausalConvBlock(dim, d) for d in (1, 2, 4))
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def collate(docs, picked):
    if not picked:
        # nothing for this rank: one dummy position with no target, so that all collectives still run
        return torch.zeros(1, 1, dtype=torch.long), torch.full((1, 1), -100)
    width = max(len(docs[i]) for i in picked) - 1
    x = torch.zeros(len(picked), width, dtype=torch.long)
    y = torch.full((len(picked), width), -100)
    for row, i in enumerate(picked):
        n = len(docs[i]) - 1
        x[row, :n], y[row, :n] = docs[i][:-1], docs[i][1:]
    return x, y


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=24)
    ap.add_argument("--budget", type=int, default=70)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="chars")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    corpus = Documents()
    sampler = TokenBudgetSampler([len(d) - 1 for d in corpus.docs], args.budget, seed=3)
    torch.manual_seed(8)
    model = CharModel(corpus.vocab)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
    opt = torch.optim.Adagrad(model.parameters(), lr=0.05)

    step = 0
    if args.resume:
        newest = max(os.listdir(args.resume), key=int)
        saved = torch.load(os.path.join(args.resume, newest, f"{rank}.pt"))
        with torch.no_grad():
            for p, (w, acc) in zip(model.parameters(), saved["shards"]):
                p.to_local().copy_(w)
                opt.state[p]["sum"].to_local().copy_(acc)
                opt.state[p]["step"].fill_(saved["step"])
        sampler.load_state_dict(saved["sampler"])
        step = saved["step"]

    while step < args.steps:
        batch = sampler.next_batch()
        total = sum(sampler.lengths[i] for i in batch)
        x, y = collate(corpus.docs, sampler.split(batch, world)[rank])
        logits = model(x)
        loss = F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=-100, reduction="sum") / total
        opt.zero_grad()
        loss.backward()
        opt.step()
        step += 1
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0:
            print(f"step {step} loss {shown:.5f} documents {len(batch)}", flush=True)
        if args.save_every and step % args.save_every == 0:
            folder = os.path.join(args.out, str(step))
            os.makedirs(folder, exist_ok=True)
            shards = [(p.detach().to_local().clone(), opt.state[p]["sum"].to_local().clone()) for p in model.parameters()]
            torch.save({"shards": shards, "sampler": sampler.state_dict(), "step": step}, os.path.join(folder, f"{rank}.pt"))
            dist.barrier()

    if args.export:
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
