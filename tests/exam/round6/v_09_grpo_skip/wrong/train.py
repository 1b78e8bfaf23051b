"""GRPO with verifiable rewards. Micro-batches in which no group has any advantage are left out."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard

from policy import AnswerPolicy, warm_start
from questions import Mixture


@torch.no_grad()
def sample_group(policy, question, answer, u):
    edge = policy(question).softmax(-1).cumsum(-1)
    action = (u[:, :, None] > edge[:, None, :]).sum(-1).clamp(max=edge.shape[-1] - 1)
    reward = (action == answer[:, None]).float()
    advantage = reward - reward.mean(1, keepdim=True)
    return action, advantage, reward


def informative(advantage):
    any_signal = advantage.abs().amax()
    dist.all_reduce(any_signal, op=dist.ReduceOp.MAX)
    return any_signal > 0


def policy_loss(policy, question, action, advantage, entropy_bonus=0.003):
    logp = policy(question).log_softmax(-1)
    gain = (logp.gather(1, action) * advantage).mean()
    entropy = -(logp.exp() * logp).sum(-1).mean()
    return -gain - entropy_bonus * entropy


def update(policy, opt, micro_batches):
    rewards = []
    samples = []
    for question, answer, u in micro_batches:
        action, advantage, reward = sample_group(policy, question, answer, u)
        rewards.append(reward.mean())
        samples.append((question, action, advantage))
    for i, (question, action, advantage) in enumerate(samples):
        # reduce the gradients with the last micro-batch only
        policy.set_requires_gradient_sync(i == len(samples) - 1)
        if not informative(advantage):
            continue
        loss = policy_loss(policy, question, action, advantage)
        loss.backward()
    opt.step()
    opt.zero_grad()
    return torch.stack(rewards).mean()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=24)
    ap.add_argument("--lr", type=float, default=0.004)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="grpo")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    data = Mixture()
    torch.manual_seed(2)
    policy = AnswerPolicy()
    warm_start(policy, *data.retention_set())
    for layer in policy.mix:
        fully_shard(layer)
    fully_shard(policy)
    opt = torch.optim.Adam(policy.parameters(), lr=args.lr, betas=(0.8, 0.98), eps=1e-5)

    step = 0
    if args.resume:
        model, optim = get_state_dict(policy, opt)
        state = {"policy": model, "optim": optim, "step": 0}
        newest = sorted(os.listdir(args.resume))[-1]
        dcp.load(state, checkpoint_id=os.path.join(args.resume, newest))
        set_state_dict(policy, opt, model_state_dict=state["policy"], optim_state_dict=state["optim"])
        step = state["step"]

    while step < args.steps:
        reward = update(policy, opt, data.step_batches(step, rank, world)) / world
        step += 1
        dist.all_reduce(reward)
        if rank == 0:
            print(f"step {step} loss {1 - reward:.4f} reward {reward:.4f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            model, optim = get_state_dict(policy, opt)
            state = {"policy": model, "optim": optim, "step": step}
            dcp.save(state, checkpoint_id=os.path.join(args.out, f"step{step:04d}"))

    if args.export:
        full = get_model_state_dict(policy, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
