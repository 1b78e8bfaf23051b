"""GRPO-style training of a tiny decoder on a verifiable toy task (continue a counting sequence)."""
import argparse
import os
import time
from collections import defaultdict

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

VOCAB, PROMPT_LEN, RESPONSE_LEN = 10, 3, 5


def parse_args():
    p = argparse.ArgumentParser()
    p.add_argument("--num_training_steps", type=int, default=16)
    p.add_argument("--num_epochs", type=int, default=2)
    p.add_argument("--num_mini_batches", type=int, default=2)
    p.add_argument("--prompts_per_step", type=int, default=8)
    p.add_argument("--samples_per_prompt", type=int, default=8)
    p.add_argument("--loss_fn", choices=["dapo", "cispo"], default="cispo")
    p.add_argument("--clip_lower", type=float, default=0.2)
    p.add_argument("--clip_higher", type=float, default=0.28)
    p.add_argument("--kl_beta", type=float, default=0.01)
    p.add_argument("--learning_rate", type=float, default=4e-3)
    p.add_argument("--temperature", type=float, default=1.0)
    p.add_argument("--seed", type=int, default=3)
    return p.parse_args()


class Layer(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.ff = nn.Sequential(nn.Linear(dim, 3 * dim), nn.GELU(), nn.Linear(3 * dim, dim))

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (y.view(b, t, self.heads, -1).transpose(1, 2) for y in self.qkv(self.ln1(x)).chunk(3, -1))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(a.transpose(1, 2).reshape(b, t, d))
        return x + self.ff(self.ln2(x))


class Policy(nn.Module):
    def __init__(self, dim=24, heads=2, layers=2):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, dim)
        self.pos = nn.Embedding(PROMPT_LEN + RESPONSE_LEN, dim)
        self.layers = nn.ModuleList(Layer(dim, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, VOCAB)

    def forward(self, ids):
        x = self.tok(ids) + self.pos(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def build(mesh, device, seed):
    torch.manual_seed(seed)
    model = Policy().to(device)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def response_logprobs(model, sequences, temperature):
    logits = model(sequences)[:, PROMPT_LEN - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(-1, sequences[:, PROMPT_LEN:, None]).squeeze(-1)


@torch.no_grad()
def rollout(model, args, step, rank, world, device):
    """Sample the responses of this rank's prompts; noise belongs to the sample, not to the rank."""
    prompts, noise = [], []
    for p in range(rank, args.prompts_per_step, world):
        g = torch.Generator().manual_seed(args.seed * 100_003 + step * args.prompts_per_step + p)
        first = torch.randint(VOCAB, (1,), generator=g)
        stride = torch.randint(1, 4, (1,), generator=g)
        prompts.append(((first + stride * torch.arange(PROMPT_LEN)) % VOCAB).repeat(args.samples_per_prompt, 1))
        u = torch.rand(args.samples_per_prompt, RESPONSE_LEN, VOCAB, generator=g).clamp_(1e-6, 1 - 1e-6)
        noise.append(-torch.log(-torch.log(u)))
    seqs, noise = torch.cat(prompts).to(device), torch.cat(noise).to(device)
    for t in range(RESPONSE_LEN):
        logits = model(seqs)[:, -1] / args.temperature
        seqs = torch.cat([seqs, (logits + noise[:, t]).argmax(-1, keepdim=True)], dim=1)
    return seqs


def verify(seqs):
    """Fraction of response tokens that continue the arithmetic progression of the prompt."""
    stride = (seqs[:, 1] - seqs[:, 0]) % VOCAB
    steps = torch.arange(PROMPT_LEN, PROMPT_LEN + RESPONSE_LEN, device=seqs.device)
    return ((seqs[:, :1] + stride[:, None] * steps) % VOCAB == seqs[:, PROMPT_LEN:]).float().mean(1)


def policy_loss(args, new_logprobs, old_logprobs, ref_logprobs, advantages):
    ratio = torch.exp(new_logprobs - old_logprobs)
    if args.loss_fn == "dapo":
        pg_losses = -advantages * ratio
        pg_losses2 = -advantages * torch.clamp(ratio, 1.0 - args.clip_lower, 1.0 + args.clip_higher)
    else:
        # cispo: clip the importance weight from above only
        pg_losses = -advantages * torch.clamp(ratio.detach(), max=1.0 + args.clip_higher) * new_logprobs
        pg_losses2 = pg_losses
    pg_loss = torch.max(pg_losses, pg_losses2)
    delta = ref_logprobs - new_logprobs
    kl = torch.exp(delta) - delta - 1
    clipfrac = (ratio > 1.0 + args.clip_higher).float().mean()
    return (pg_loss + args.kl_beta * kl).mean(), kl.mean(), clipfrac


def main():
    args = parse_args()
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    mesh = init_device_mesh(device.type, (world,))
    policy = build(mesh, device, args.seed)
    ref_policy = build(mesh, device, args.seed).requires_grad_(False)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=args.learning_rate, weight_decay=0.0)

    began = time.time()
    for step in range(1, args.num_training_steps + 1):
        seqs = rollout(policy, args, step, rank, world, device)
        scores = verify(seqs)
        groups = scores.view(-1, args.samples_per_prompt)
        advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
        with torch.no_grad():
            old_logprobs = response_logprobs(policy, seqs, args.temperature)
            ref_logprobs = response_logprobs(ref_policy, seqs, args.temperature)

        # every mini batch takes a slice of the samples of each prompt
        index = torch.arange(len(seqs), device=device).view(-1, args.samples_per_prompt)
        minibatches = [m.reshape(-1) for m in index.chunk(args.num_mini_batches, dim=1)]
        advantages = advantages.reshape(-1, 1)
        metrics = defaultdict(list)
        for _ in range(args.num_epochs):
            for mb in minibatches:
                new_logprobs = response_logprobs(policy, seqs[mb], args.temperature)
                loss, kl, clipfrac = policy_loss(
                    args, new_logprobs, old_logprobs[mb], ref_logprobs[mb], advantages[mb]
                )
                optimizer.zero_grad()
                loss.backward()
                grad_norm = nn.utils.clip_grad_norm_(policy.parameters(), 1.0).full_tensor()
                optimizer.step()
                for key, value in (("loss", loss), ("kl", kl), ("clipfrac", clipfrac), ("grad_norm", grad_norm)):
                    metrics[key].append(value.detach())
        metrics["score"].append(scores.mean())
        names = sorted(metrics)
        values = torch.stack([torch.stack(metrics[n]).mean() for n in names])
        dist.all_reduce(values)
        if rank == 0:
            print(f"step {step:2d} " + " ".join(f"{n} {v:.5f}" for n, v in zip(names, (values / world).tolist())))

    weight = sum(p.full_tensor().double().abs().sum() for p in policy.parameters()).item()
    if rank == 0:
        print(f"finished in {time.time() - began:.1f}s, |w| {weight:.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
