"""Group relative policy optimisation with a frozen reference, several inner passes and an adaptive KL weight."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions, get_model_state_dict, get_state_dict, set_state_dict)

import env
from actor import freeze_copy_of, make_actor
from rollout import logps, sample


def total(*values):
    v = torch.stack([torch.as_tensor(x, dtype=torch.float32).detach() for x in values])
    dist.all_reduce(v)
    return v.tolist()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=20)
    p.add_argument("--prompts", type=int, default=16, help="of the whole job")
    p.add_argument("--group", type=int, default=8)
    p.add_argument("--passes", type=int, default=3)
    p.add_argument("--stop-kl", type=float, default=0.02)
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--out", default="")
    p.add_argument("--resume", default="")
    p.add_argument("--export", default="")
    args = p.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    actor = make_actor()
    reference = freeze_copy_of(actor)
    opt = torch.optim.Adam(actor.parameters(), lr=5e-3)
    kl_weight, first = 0.05, 0

    def state(step):
        m, o = get_state_dict(actor, opt)
        return {"actor": m, "opt": o, "kl_weight": kl_weight, "step": step}

    if args.resume:
        st = state(0)
        dcp.load(st, checkpoint_id=os.path.join(args.resume, sorted(os.listdir(args.resume))[-1]))
        set_state_dict(actor, opt, model_state_dict=st["actor"], optim_state_dict=st["opt"])
        kl_weight, first = st["kl_weight"], st["step"]

    for step in range(first, args.steps):
        prompt = env.prompts(step, args.prompts).chunk(world)[rank].repeat_interleave(args.group, 0)
        g = torch.Generator().manual_seed(70_000 + step)
        uniforms = torch.rand(args.prompts * args.group, env.MAXLEN, generator=g).chunk(world)[rank]
        tokens, mask = sample(actor, prompt, uniforms)
        r = env.reward(prompt, tokens, mask)
        grouped = r.view(-1, args.group)
        adv = ((grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-4)).view(-1, 1)
        with torch.no_grad():
            old, ref = logps(actor, prompt, tokens), logps(reference, prompt, tokens)
        count, reward_sum = total(mask.sum(), r.sum())

        for inner in range(args.passes):
            new = logps(actor, prompt, tokens)
            ratio = (new - old).exp()
            gain = torch.minimum(ratio * adv, ratio.clamp(0.8, 1.2) * adv)
            k3 = (ref - new).exp() - (ref - new) - 1
            loss = ((kl_weight * k3 - gain) * mask).sum() * world / count
            opt.zero_grad()
            loss.backward()
            opt.step()
            moved, ref_kl, obj = total((0.5 * (new - old).pow(2) * mask).sum() / count, (k3 * mask).sum() / count, loss / world)
            if moved > args.stop_kl:
                break
        kl_weight *= 1.1 if ref_kl > 0.1 else 1 / 1.1
        if rank == 0:
            print(f"step {step + 1} reward {reward_sum / (args.prompts * args.group):.3f} loss {obj:.4f} kl {ref_kl:.4f} "
                  f"passes {inner + 1} weight {kl_weight:.4f}", flush=True)
        if args.save_every and args.out and (step + 1) % args.save_every == 0:
            dcp.save(state(step + 1), checkpoint_id=os.path.join(args.out, f"policy_{step + 1:05d}"))

    if args.export:
        full = get_model_state_dict(actor, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
