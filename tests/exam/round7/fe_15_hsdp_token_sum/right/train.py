import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from data import IGNORE, VOCAB, Corpus
from engine import accumulation, hsdp_mesh, window_tokens, wrap
from model import ConvLM

STEPS, MICRO, ROWS = 16, 3, 16


def local(tensor):
    """The shard of a DTensor; step counters and the like are ordinary tensors."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class LocalShards:
    """Plain tensors of the local shards, one file a rank, written under a temporary name first."""

    def __init__(self, folder):
        self.folder = folder

    def file(self, step):
        return os.path.join(self.folder, f"{step:04d}", f"{dist.get_rank()}_{dist.get_world_size()}.pt")

    def save(self, step, model, optimizer, corpus, history):
        os.makedirs(os.path.dirname(self.file(step)), exist_ok=True)
        state = {
            "params": [local(p) for p in model.parameters()],
            "moments": [
                {key: local(value) for key, value in optimizer.state[p].items()} for p in model.parameters()
            ],
            "corpus": corpus.gen.get_state(),
            "history": history,
            "step": step,
        }
        torch.save(state, self.file(step) + ".tmp")
        os.replace(self.file(step) + ".tmp", self.file(step))
        dist.barrier()

    @torch.no_grad()
    def load(self, model, optimizer, corpus):
        state = torch.load(self.file(max(int(n) for n in os.listdir(self.folder))))
        # a step with zero gradients and zero rate makes the moment tensors in their sharded form
        rates = [g["lr"] for g in optimizer.param_groups]
        for g in optimizer.param_groups:
            g["lr"] = 0.0
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
        optimizer.zero_grad()
        for g, lr in zip(optimizer.param_groups, rates):
            g["lr"] = lr
        for p, shard, moments in zip(model.parameters(), state["params"], state["moments"], strict=True):
            local(p).copy_(shard)
            for key, value in moments.items():
                local(optimizer.state[p][key]).copy_(value)
        corpus.gen.set_state(state["corpus"])
        return state["step"], state["history"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument("--out", default="shards")
    parser.add_argument("--resume")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    model = wrap(ConvLM(VOCAB), hsdp_mesh())
    optimizer = torch.optim.NAdam(model.parameters(), lr=4e-3, foreach=False)
    corpus = Corpus(seed=6)
    step, history = LocalShards(args.resume).load(model, optimizer, corpus) if args.resume else (0, [])

    while step < STEPS:
        windows = corpus.window(MICRO, ROWS, rank, world)
        tokens = window_tokens(windows, IGNORE)
        total = torch.zeros(())
        for i, (x, y) in enumerate(windows):
            with accumulation(model, last=i == MICRO - 1):
                loss = F.cross_entropy(model(x).transpose(1, 2), y, ignore_index=IGNORE, reduction="sum") / tokens
                loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        step += 1
        history.append(total.item())
        if rank == 0 and step % 4 == 0:
            print(f"step {step} loss {history[-1]:.6f} mean of last four {sum(history[-4:]) / 4:.6f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            LocalShards(args.out).save(step, model, optimizer, corpus, history)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
