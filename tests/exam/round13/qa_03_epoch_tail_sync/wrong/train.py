"""Pre-training of a small character model, a fixed corpus over several epochs."""
import argparse
import math
import pathlib

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

VOCAB, WIDTH, DEPTH, CONTEXT = 32, 32, 2, 24


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_a, self.ln_m = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate_up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        q, k, v = self.qkv(self.ln_a(x)).unflatten(-1, (3, 4, WIDTH // 4)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.ln_m(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class CharLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(VOCAB, WIDTH)
        self.wpe = nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.ModuleList(Mixer() for _ in range(DEPTH))
        self.ln = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids):
        x = self.wte(ids) + self.wpe.weight[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.ln(x))


def markov_corpus(n_seq, seed=0):
    g = torch.Generator().manual_seed(seed)
    trans = torch.softmax(2.5 * torch.randn(VOCAB, VOCAB, generator=g), -1)
    rows = torch.randint(0, VOCAB, (n_seq, 1), generator=g)
    for _ in range(CONTEXT):
        rows = torch.cat([rows, torch.multinomial(trans[rows[:, -1]], 1, generator=g)], 1)
    return rows


class Trainer:
    def __init__(self, cfg):
        self.cfg = cfg
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(cfg.seed)
        self.model = CharLM()
        for layer in self.model.layers:
            fully_shard(layer)
        fully_shard(self.model)
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=cfg.lr, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1)
        self.corpus = markov_corpus(cfg.sequences)
        self.n_micro = cfg.sequences // cfg.micro
        self.total = cfg.epochs * math.ceil(self.n_micro / cfg.accum)
        self.updates, self.epoch, self.next_micro = 0, 0, 0

    def progress(self):
        return {"updates": self.updates, "epoch": self.epoch, "next_micro": self.next_micro}

    def save(self):
        model, optim = get_state_dict(self.model, self.opt)
        where = pathlib.Path(self.cfg.out) / f"u{self.updates}"
        dcp.save({"model": model, "optim": optim, "progress": self.progress()}, checkpoint_id=str(where))

    def restore(self, folder):
        where = max(pathlib.Path(folder).glob("u*"), key=lambda d: int(d.name[1:]))
        model, optim = get_state_dict(self.model, self.opt)
        box = {"model": model, "optim": optim, "progress": self.progress()}
        dcp.load(box, checkpoint_id=str(where))
        set_state_dict(self.model, self.opt, model_state_dict=box["model"], optim_state_dict=box["optim"])
        self.updates, self.epoch, self.next_micro = (box["progress"][k] for k in ("updates", "epoch", "next_micro"))

    def micro_batch(self, order, i):
        rows = order[i * self.cfg.micro : (i + 1) * self.cfg.micro]
        return self.corpus[rows[self.rank :: self.world]]

    def run_epoch(self):
        accum = self.cfg.accum
        order = torch.randperm(len(self.corpus), generator=torch.Generator().manual_seed(100 + self.epoch))
        running = torch.zeros(())
        for i in range(self.next_micro, self.n_micro):
            window = min(accum, self.n_micro - i // accum * accum)
            boundary = (i + 1) % accum == 0 or i + 1 == self.n_micro
            self.model.set_requires_gradient_sync((i + 1) % accum == 0)
            ids = self.micro_batch(order, i)
            loss = F.cross_entropy(self.model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
            (loss / window).backward()
            running += loss.detach() / window
            if boundary:
                nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                self.step_optimizer()
                self.next_micro = i + 1
                self.report(running)
                running = torch.zeros(())
                if self.cfg.save_every and self.updates % self.cfg.save_every == 0 and self.updates < self.total:
                    self.save()

    def step_optimizer(self):
        for g in self.opt.param_groups:
            g["lr"] = self.cfg.lr * (0.55 + 0.45 * math.cos(math.pi * self.updates / self.total))
        self.opt.step()
        self.opt.zero_grad()
        self.updates += 1

    def report(self, running):
        dist.all_reduce(running)
        if self.rank == 0:
            print(f"epoch {self.epoch} update {self.updates}/{self.total} loss {running / self.world:.4f}", flush=True)

    def fit(self):
        while self.epoch < self.cfg.epochs:
            self.run_epoch()
            self.epoch, self.next_micro = self.epoch + 1, 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--sequences", type=int, default=44)
    parser.add_argument("--micro", type=int, default=4, help="sequences in a micro-batch, all ranks together")
    parser.add_argument("--accum", type=int, default=4)
    parser.add_argument("--lr", type=float, default=8e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument("--out")
    parser.add_argument("--resume")
    cfg = parser.parse_args()
    dist.init_process_group("gloo")
    trainer = Trainer(cfg)
    if cfg.resume:
        trainer.restore(cfg.resume)
    trainer.fit()
    dist.destroy_process_group()
