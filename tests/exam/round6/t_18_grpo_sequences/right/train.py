"""Group-relative policy optimisation on a toy language: the reward is the share of tokens that continue an ascending run.

Three phases per iteration: roll-outs, old and reference log-probabilities, two passes of clipped updates."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from policy import Policy, roll_out, token_logp

VOCAB, PROMPT, NEW, GROUP, PROMPTS = 12, 3, 8, 6, 8


def shard(model):
    for b in model.blocks:
        fully_shard(b)
    fully_shard(model)
    return model


def reward(ids):
    tail = ids[:, PROMPT - 1 :]
    return ((tail[:, 1:] - tail[:, :-1]) % VOCAB == 1).float().mean(1) + 0.2 * ((tail[:, 1:] - tail[:, :-1]) % VOCAB < 4).float().mean(1)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--iters", type=int, default=8)
    ap.add_argument("--out")
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(61)
    model = Policy(VOCAB)
    reference = Policy(VOCAB)
    reference.load_state_dict(model.state_dict())
    reference.requires_grad_(False)
    model, reference = shard(model), shard(reference)
    opt = torch.optim.Adam(model.parameters(), lr=6e-3, eps=1e-5)

    def state():
        m, o = get_state_dict(model, opt)
        return {"policy": m, "opt": o, "reference": reference.state_dict(), "kl_coef": torch.tensor(kl_coef, dtype=torch.float64)}

    it, kl_coef = 0, 0.02
    if args.resume:
        it = max(int(d.split("_")[1]) for d in os.listdir(args.resume))
        st = state()
        dcp.load(st, checkpoint_id=os.path.join(args.resume, f"iter_{it}"))
        set_state_dict(model, opt, model_state_dict=st["policy"], optim_state_dict=st["opt"])
        reference.load_state_dict(st["reference"])
        kl_coef = st["kl_coef"].item()

    while it < args.iters:
        g = torch.Generator().manual_seed(4242 + it)
        prompts = torch.randint(0, VOCAB, (PROMPTS, PROMPT), generator=g).repeat_interleave(GROUP, 0)
        uniforms = torch.rand(PROMPTS * GROUP, NEW, generator=g)
        # whole groups stay on one rank
        prompts, uniforms = prompts.chunk(world)[rank], uniforms.chunk(world)[rank]
        ids = roll_out(model, prompts, uniforms)
        with torch.no_grad():
            old = token_logp(model, ids, PROMPT)
            ref = token_logp(reference, ids, PROMPT)
            model.reshard()
            r = reward(ids).view(-1, GROUP)
            adv = ((r - r.mean(1, keepdim=True)) / (r.std(1, keepdim=True) + 0.1)).flatten()[:, None]

        for _ in range(2):
            logp = token_logp(model, ids, PROMPT)
            ratio = (logp - old).exp()
            gain = torch.minimum(ratio * adv, ratio.clamp(0.8, 1.2) * adv)
            kl = (ref - logp).exp() - (ref - logp) - 1
            loss = (kl_coef * kl - gain).mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            opt.zero_grad()
        it += 1

        report = torch.stack([r.mean(), kl.detach().mean()])
        dist.all_reduce(report)
        mean_reward, mean_kl = (report / world).tolist()
        # keep the divergence near its target; rounded, so that it does not feed float noise back
        kl_coef = round(kl_coef * (1.5 if mean_kl > 0.05 else 0.8), 6)
        if rank == 0:
            print(f"iteration {it} reward {mean_reward:.4f} kl {mean_kl:.4f} coef {kl_coef}", flush=True)
        if args.save_every and it % args.save_every == 0:
            dcp.save(state(), checkpoint_id=os.path.join(args.out, f"iter_{it}"))

    full = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in model.state_dict().items()}
    if args.export and rank == 0:
        torch.save(full, args.export)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
