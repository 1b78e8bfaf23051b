"""Behaviour cloning of action chunks (ACT style, L1 + KL) on synthetic reaching episodes."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

STATE_DIM, ACTION_DIM, MAX_ACTION_DIM = 6, 3, 4


def parse_args():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=40)
    p.add_argument("--batch_size", type=int, default=32)
    p.add_argument("--chunk_size", type=int, default=12)
    p.add_argument("--dim_model", type=int, default=24)
    p.add_argument("--latent_dim", type=int, default=4)
    p.add_argument("--kl_weight", type=float, default=0.02)
    p.add_argument("--lr", type=float, default=3e-3)
    p.add_argument("--grad_clip_norm", type=float, default=1.0)
    p.add_argument("--log_freq", type=int, default=5)
    p.add_argument("--seed", type=int, default=1000)
    return p.parse_args()


class ReachingDataset:
    """Episodes of varying length; a chunk that runs over the end is filled with the last action."""

    def __init__(self, seed, chunk_size):
        self.seed, self.chunk_size = seed, chunk_size

    def __getitem__(self, index):
        g = torch.Generator().manual_seed(self.seed * 40503 + index)
        length = int(torch.randint(8, 24, (1,), generator=g))
        t = int(torch.randint(length, (1,), generator=g))
        goal, pos = torch.randn(2, ACTION_DIM, generator=g)
        actions = []
        for _ in range(self.chunk_size):
            action = 0.25 * (goal - pos)
            actions.append(action)
            pos = pos + action
        state = torch.cat([goal, goal - actions[0] / 0.25])
        actions = torch.stack(actions) + 0.02 * torch.randn(self.chunk_size, ACTION_DIM, generator=g)
        is_pad = torch.arange(t, t + self.chunk_size) >= length
        n_real = max(1, int((~is_pad).sum()))
        actions[is_pad] = actions[n_real - 1].clone()
        return {"state": state, "action": F.pad(actions, (0, MAX_ACTION_DIM - ACTION_DIM)), "action_is_pad": is_pad}

    def batch(self, step, batch_size, rank, world):
        items = [self[step * batch_size + i] for i in range(rank, batch_size, world)]
        return {k: torch.stack([it[k] for it in items]) for k in items[0]}

    def latent_noise(self, step, batch_size, dim, rank, world):
        g = torch.Generator().manual_seed(self.seed + 77 * step)
        return torch.randn(batch_size, dim, generator=g)[rank::world]


class EncoderLayer(nn.Module):
    def __init__(self, dim, heads=2):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.ff = nn.Sequential(nn.Linear(dim, 2 * dim), nn.ReLU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, d))
        return x + self.ff(self.norm2(x))


class ACTPolicy(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        d = cfg.dim_model
        self.vae_encoder = nn.Sequential(
            nn.Linear(STATE_DIM + MAX_ACTION_DIM, d), nn.ReLU(), nn.Linear(d, 2 * cfg.latent_dim)
        )
        self.state_proj = nn.Linear(STATE_DIM, d)
        self.latent_proj = nn.Linear(cfg.latent_dim, d)
        self.queries = nn.Parameter(0.1 * torch.randn(cfg.chunk_size, d))
        self.layers = nn.ModuleList(EncoderLayer(d) for _ in range(2))
        self.action_head = nn.Linear(d, MAX_ACTION_DIM)

    def forward(self, batch, noise):
        valid = (~batch["action_is_pad"]).float()[..., None]
        pooled = (batch["action"] * valid).sum(1) / valid.sum(1).clamp_min(1)
        mu, log_var = self.vae_encoder(torch.cat([batch["state"], pooled], -1)).chunk(2, -1)
        latent = mu + (log_var / 2).exp() * noise
        x = self.queries.expand(len(mu), -1, -1)
        context = torch.stack([self.state_proj(batch["state"]), self.latent_proj(latent)], 1)
        x = torch.cat([context, x], 1)
        for layer in self.layers:
            x = layer(x)
        return self.action_head(x[:, 2:]), mu, log_var


def compute_loss(policy, batch, noise, kl_weight, world):
    pred, mu, log_var = policy(batch, noise)
    actions_is_pad = batch["action_is_pad"]
    losses = F.l1_loss(pred, batch["action"], reduction="none")[..., :ACTION_DIM]
    losses = losses * ~actions_is_pad[..., None]
    num_valid = (~actions_is_pad).sum().float()
    dist.all_reduce(num_valid)
    l1 = losses.sum() * world / (num_valid * losses.shape[-1]).clamp_min(1)
    kl = (-0.5 * (1 + log_var - mu.pow(2) - log_var.exp())).sum(-1).mean()
    info = {"l1": l1.detach(), "kl": kl.detach(), "valid": num_valid / actions_is_pad.numel() / world}
    return l1 + kl_weight * kl, info


def main():
    cfg = parse_args()
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    mesh = init_device_mesh(device.type, (world,))
    torch.manual_seed(cfg.seed)
    policy = ACTPolicy(cfg).to(device)
    for layer in policy.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(policy, mesh=mesh)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=cfg.lr, weight_decay=1e-4)

    dataset = ReachingDataset(cfg.seed, cfg.chunk_size)
    for step in range(1, cfg.steps + 1):
        batch = {k: v.to(device) for k, v in dataset.batch(step, cfg.batch_size, rank, world).items()}
        noise = dataset.latent_noise(step, cfg.batch_size, cfg.latent_dim, rank, world).to(device)
        loss, info = compute_loss(policy, batch, noise, cfg.kl_weight, world)
        loss.backward()
        grad_norm = nn.utils.clip_grad_norm_(policy.parameters(), cfg.grad_clip_norm).full_tensor()
        optimizer.step()
        optimizer.zero_grad()
        stats = torch.stack([loss.detach(), info["l1"], info["kl"], info["valid"]])
        dist.all_reduce(stats)
        if rank == 0 and (step % cfg.log_freq == 0 or step == 1):
            loss_v, l1, kl, valid = (stats / world).tolist()
            print(
                f"step:{step} loss:{loss_v:.6f} l1:{l1:.6f} kl:{kl:.6f} valid:{valid:.3f} grdn:{grad_norm.item():.5f}",
                flush=True,
            )

    weight = sum(p.full_tensor().double().abs().sum() for p in policy.parameters()).item()
    if rank == 0:
        print(f"end of training, |w| {weight:.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
