"""GRU language model with gradient accumulation; the last window of an epoch may be short."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from data import epoch_batches, make_sequences


class GRULayer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.cell = nn.GRU(dim, dim, batch_first=True)

    def forward(self, x):
        return x + self.cell(self.norm(x))[0]


class SeqModel(nn.Module):
    def __init__(self, vocab=40, dim=32, layers=2):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(GRULayer(dim) for _ in range(layers))
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, x):
        h = self.emb(x)
        for layer in self.layers:
            h = layer(h)
        return self.head(h)


class Trainer:
    def __init__(self, args):
        self.args = args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(0)
        self.model = SeqModel()
        for layer in self.model.layers:
            fully_shard(layer)
        fully_shard(self.model)
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=3e-3, eps=1e-6)
        self.data = make_sequences()
        self.n_micro = -(-len(self.data) // args.micro)
        self.epoch = 0
        self.updates = 0

    def run_epoch(self):
        a = self.args
        total = torch.zeros(())
        for i, seq in enumerate(epoch_batches(self.data, self.epoch, a.micro, self.rank, self.world)):
            window_start = i - i % a.accum
            window = min(a.accum, self.n_micro - window_start)
            last = i + 1 == window_start + window
            self.model.set_requires_gradient_sync((i + 1) % a.accum == 0)
            logits = self.model(seq[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), seq[:, 1:].flatten())
            (loss / window).backward()
            total += loss.detach()
            if last:
                self.opt.step()
                self.opt.zero_grad()
                self.updates += 1
        dist.all_reduce(total)
        self.epoch += 1
        if self.rank == 0:
            print(f"epoch {self.epoch} updates {self.updates} loss {total.item() / self.n_micro / self.world:.4f}", flush=True)

    def state(self):
        m, o = get_state_dict(self.model, self.opt)
        return {"model": m, "optim": o, "epoch": torch.tensor(self.epoch), "updates": torch.tensor(self.updates)}

    def save(self):
        dcp.save(self.state(), checkpoint_id=os.path.join(self.args.out, f"epoch_{self.epoch:03d}"))

    def resume(self, folder):
        newest = sorted(d for d in os.listdir(folder) if d.startswith("epoch_"))[-1]
        state = self.state()
        dcp.load(state, checkpoint_id=os.path.join(folder, newest))
        set_state_dict(self.model, self.opt, model_state_dict=state["model"], optim_state_dict=state["optim"])
        self.epoch, self.updates = int(state["epoch"]), int(state["updates"])


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=5)
    p.add_argument("--micro", type=int, default=8, help="sequences per micro-batch over all ranks")
    p.add_argument("--accum", type=int, default=4)
    p.add_argument("--out")
    p.add_argument("--save-every", type=int, default=0, help="epochs")
    p.add_argument("--resume")
    p.add_argument("--export")
    args = p.parse_args()
    dist.init_process_group("gloo")
    t = Trainer(args)
    if args.resume:
        t.resume(args.resume)
    while t.epoch < args.epochs:
        t.run_epoch()
        if args.save_every and t.epoch % args.save_every == 0:
            t.save()
    full = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in t.model.state_dict().items()}
    if args.export and t.rank == 0:
        torch.save(full, args.export)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
