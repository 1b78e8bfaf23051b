"""SFT of a masked diffusion language model (LLaDA style).

Every sequence is corrupted by replacing response tokens with [MASK] at a rate
t ~ U(0, 1); the model predicts the masked tokens, weighted by 1 / t.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

VOCAB = 32
MASK_ID = VOCAB
LENGTH, PROMPT = 20, 8


class Layer(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.o = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 3 * dim), nn.Linear(3 * dim, dim)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (z.view(b, t, self.heads, -1).transpose(1, 2) for z in self.qkv(self.n1(x)).chunk(3, -1))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.n2(x))))


class DiffusionLM(nn.Module):
    def __init__(self, dim=20, heads=2, depth=2):
        super().__init__()
        self.embed = nn.Embedding(VOCAB + 1, dim)
        self.pos = nn.Parameter(0.02 * torch.randn(LENGTH, dim))
        self.layers = nn.ModuleList(Layer(dim, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.out = nn.Linear(dim, VOCAB)

    def forward(self, ids):
        x = self.embed(ids) + self.pos
        for layer in self.layers:
            x = layer(x)
        return self.out(self.norm(x))


def build_dataset(n, seed):
    g = torch.Generator().manual_seed(seed)
    prompt = torch.randint(0, VOCAB, (n, PROMPT), generator=g)
    key = torch.arange(LENGTH - PROMPT) % PROMPT
    response = (prompt[:, key] + 1 + torch.arange(LENGTH - PROMPT) // PROMPT) % VOCAB
    return torch.cat([prompt, response], dim=1)


def corrupt_uniform(ids, loss_mask, eps=1e-2, generator=None):
    """Masks each supervised position with the probability of its sequence."""
    b, length = ids.shape
    t = torch.rand((b,), generator=generator)
    p_mask = ((1 - eps) * t + eps)[:, None].expand(b, length)
    noise_mask = (torch.rand((b, length), generator=generator) < p_mask) & loss_mask
    return torch.where(noise_mask, MASK_ID, ids), noise_mask, p_mask


def corruption_seed(seed, global_index):
    return (seed * 1_000_003 + global_index) % (2**63 - 1)


class Recipe:
    def __init__(self, args):
        self.args = args
        use_cuda = torch.cuda.is_available()
        dist.init_process_group("nccl" if use_cuda else "gloo")
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.device = torch.device("cpu")
        if use_cuda:
            self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(self.device)

        torch.manual_seed(args.seed)
        self.model = DiffusionLM().to(self.device)
        mesh = init_device_mesh(self.device.type, (self.world,), mesh_dim_names=("dp",))
        for layer in self.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.lr, weight_decay=0.0)
        # same weights everywhere, but each rank has random numbers of its own from here on
        torch.manual_seed(args.seed + self.rank)

        self.data = build_dataset(args.num_samples, args.seed)
        self.loss_mask = torch.zeros(LENGTH, dtype=torch.bool)
        self.loss_mask[PROMPT:] = True
        self.step = 0

    def batch(self, step, micro):
        """Indices into the shuffled stream and the sequences of this rank's micro-batch."""
        args = self.args
        per_rank = args.micro_batch // self.world
        first = (step * args.grad_accum + micro) * args.micro_batch + self.rank * per_rank
        stream = torch.arange(first, first + per_rank)
        epoch = first // len(self.data)
        g = torch.Generator().manual_seed(args.seed + epoch)
        order = torch.randperm(len(self.data), generator=g)
        return stream, self.data[order[stream % len(self.data)]]

    def apply_corruption(self, stream, ids):
        mask = self.loss_mask.expand_as(ids)
        parts = []
        for i, index in enumerate(stream.tolist()):
            g = torch.Generator().manual_seed(corruption_seed(self.args.seed, index))
            parts.append(corrupt_uniform(ids[i : i + 1], mask[i : i + 1], generator=g))
        return [torch.cat(p).to(self.device) for p in zip(*parts)]

    def train_step(self):
        args = self.args
        total = torch.zeros((), device=self.device)
        num_supervised = args.grad_accum * args.micro_batch * int(self.loss_mask.sum())
        for micro in range(args.grad_accum):
            stream, ids = self.batch(self.step, micro)
            noisy, noise_mask, p_mask = self.apply_corruption(stream, ids)
            logits = self.model(noisy)
            token_loss = F.cross_entropy(logits.transpose(1, 2), ids.to(self.device), reduction="none")
            loss = (token_loss * noise_mask / p_mask).sum() / num_supervised
            # gradients are averaged over the ranks
            (loss * self.world).backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        dist.all_reduce(total)
        return total.item()

    @torch.no_grad()
    def validate(self):
        self.model.eval()
        ids = build_dataset(64, self.args.seed + 1)
        per_rank = len(ids) // self.world
        ids = ids[self.rank * per_rank : (self.rank + 1) * per_rank].to(self.device)
        noisy = ids.clone()
        noisy[:, PROMPT::2] = MASK_ID
        loss = F.cross_entropy(self.model(noisy)[:, PROMPT::2].flatten(0, 1), ids[:, PROMPT::2].flatten())
        dist.all_reduce(loss)
        self.model.train()
        return loss.item() / self.world

    def save(self):
        model_state, optim_state = get_state_dict(self.model, self.optimizer)
        state = {"model": model_state, "optim": optim_state, "step": self.step}
        dcp.save(state, checkpoint_id=str(self.args.ckpt / f"step_{self.step}"))
        if self.rank == 0:
            (self.args.ckpt / "latest").write_text(f"step_{self.step}")

    def load(self):
        model_state, optim_state = get_state_dict(self.model, self.optimizer)
        state = {"model": model_state, "optim": optim_state, "step": 0}
        dcp.load(state, checkpoint_id=str(self.args.ckpt / (self.args.ckpt / "latest").read_text()))
        set_state_dict(
            self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
        )
        self.step = state["step"]

    def run(self):
        args = self.args
        if args.resume:
            self.load()
        while self.step < args.steps:
            loss = self.train_step()
            if self.rank == 0 and self.step % args.log_every == 0:
                print(f"step {self.step} loss {loss:.6f}", flush=True)
            if args.save_every and args.ckpt and not args.resume and self.step % args.save_every == 0:
                self.save()
        val = self.validate()
        if self.rank == 0:
            print(f"validation loss {val:.6f}")
        dist.destroy_process_group()


def parse_args():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=20)
    p.add_argument("--micro-batch", type=int, default=8, help="over all ranks")
    p.add_argument("--grad-accum", type=int, default=2)
    p.add_argument("--num-samples", type=int, default=192)
    p.add_argument("--lr", type=float, default=4e-3)
    p.add_argument("--log-every", type=int, default=2)
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--ckpt", type=Path, default=None)
    p.add_argument("--resume", action="store_true")
    p.add_argument("--seed", type=int, default=7)
    return p.parse_args()


if __name__ == "__main__":
    Recipe(parse_args()).run()
