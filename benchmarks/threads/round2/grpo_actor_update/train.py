"""GRPO-style update of a small policy on fixed synthetic rollouts.

Every iteration: score a group of completions per prompt with the frozen sampling
policy, normalise the rewards inside the group, then take one clipped policy-gradient
step with a KL penalty to the reference model.
"""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

VOCAB, PROMPT, COMPLETION = 48, 6, 10


class DecoderLayer(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.norm2 = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, d // self.heads).unbind(2)
        attn = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        x = x + self.proj(attn.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Policy(nn.Module):
    _no_split_modules = ("DecoderLayer",)

    def __init__(self, dim=32, heads=4, layers=6):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.pos = nn.Embedding(PROMPT + COMPLETION, dim)
        self.layers = nn.ModuleList(DecoderLayer(dim, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.lm_head = nn.Linear(dim, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens) + self.pos(torch.arange(tokens.size(1), device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


def token_logprobs(model, tokens):
    logits = model(tokens[:, :-1])
    logp = torch.log_softmax(logits.float(), dim=-1)
    return logp.gather(-1, tokens[:, 1:].unsqueeze(-1)).squeeze(-1)[:, PROMPT - 1:]


def shard_model(model, mesh):
    modules = [m for m in model.modules()
               if m.__class__.__name__ in model._no_split_modules or isinstance(m, nn.Embedding)]
    for module in modules:
        fully_shard(module, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def rollout_batch(step, prompts, group):
    """All rollouts of one iteration (prompts x group), the same on every rank."""
    gen = torch.Generator().manual_seed(9000 + step)
    prompt = torch.randint(VOCAB, (prompts, 1, PROMPT), generator=gen).expand(-1, group, -1)
    completion = torch.randint(VOCAB, (prompts, group, COMPLETION), generator=gen)
    tokens = torch.cat([prompt, completion], dim=-1)
    # reward: how often a completion token is the successor of the last prompt token
    target = (prompt[..., -1:] + 1) % VOCAB
    reward = (completion - target).abs().lt(6).float().mean(-1)
    adv = (reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-4)
    return tokens, adv, reward


class GRPOActor:
    def __init__(self, args, mesh, device):
        self.args, self.device = args, device
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(args.seed)
        model = Policy().to(device)
        reference = Policy().to(device)
        reference.load_state_dict(model.state_dict())
        self.reference = shard_model(reference.requires_grad_(False).eval(), mesh)
        self.model = shard_model(model, mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.lr, weight_decay=0.01)

    def train_step(self, step):
        args = self.args
        tokens, adv, reward = rollout_batch(step, args.prompts, args.group)
        tokens = tokens[self.rank::self.world].flatten(0, 1).to(self.device)
        adv = adv[self.rank::self.world].flatten(0, 1).to(self.device)
        with torch.no_grad():
            ref_logp = token_logprobs(self.reference, tokens)
            old_logp = token_logprobs(self.model, tokens)

        loss_sum = torch.zeros((), device=self.device)
        for _ in range(args.epochs):
            logp = token_logprobs(self.model, tokens)
            ratio = (logp - old_logp).exp()
            pg = -torch.min(ratio * adv[:, None],
                            ratio.clamp(1 - args.clip, 1 + args.clip) * adv[:, None])
            log_r = ref_logp - logp
            kl = log_r.exp() - log_r - 1
            loss = (pg + args.kl * kl).mean()
            loss.backward()
            grad_norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            loss_sum += loss.detach()
        loss_sum /= args.epochs
        dist.all_reduce(loss_sum)
        return loss_sum.item() / self.world, float(grad_norm.full_tensor()), reward.mean().item()


@torch.no_grad()
def evaluate(actor, n=64):
    gen = torch.Generator().manual_seed(77)
    prompt = torch.randint(VOCAB, (n, PROMPT), generator=gen)
    mine = prompt[actor.rank::actor.world].to(actor.device)
    probs = actor.model(mine)[:, -1].float().softmax(-1)
    near = (torch.arange(VOCAB, device=actor.device)[None] - (mine[:, -1:] + 1) % VOCAB).abs() < 6
    hit = (probs * near).sum()
    dist.all_reduce(hit)
    return hit.item() / n


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--iters", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--clip", type=float, default=0.2)
    parser.add_argument("--kl", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=5)
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("dp",))

    actor = GRPOActor(args, mesh, device)
    if actor.rank == 0:
        total = sum(p.numel() for p in actor.model.parameters())
        print(f"policy parameters: {total}")
    for step in range(args.iters):
        loss, norm, reward = actor.train_step(step)
        if actor.rank == 0:
            print(f"iter {step:3d}  loss {loss:.6f}  grad_norm {norm:.5f}  reward {reward:.4f}")
    score = evaluate(actor)
    if actor.rank == 0:
        print(f"probability on rewarded tokens: {score:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
