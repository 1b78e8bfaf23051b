"""Policy training on scored responses of a fixed sampler; a background thread prepares the batches."""
import argparse
import os
import threading
from queue import Full, Queue

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

VOCAB, LENGTH = 12, 8


def parse_args():
    p = argparse.ArgumentParser()
    p.add_argument("--num-training-steps", type=int, default=20)
    p.add_argument("--prompts", type=int, default=8)
    p.add_argument("--samples-per-prompt", type=int, default=4)
    p.add_argument("--lr", type=float, default=3e-3)
    p.add_argument("--async-steps", type=int, default=2)
    p.add_argument("--seed", type=int, default=17)
    p.add_argument("--ckpt", default=None)
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--resume", action="store_true")
    return p.parse_args()


class Layer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.mix = nn.GRU(dim, dim, batch_first=True)
        self.ff = nn.Sequential(nn.Linear(dim, 2 * dim), nn.SiLU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        x = x + self.mix(self.norm(x))[0]
        return x + self.ff(x)


class Policy(nn.Module):
    def __init__(self, dim=20, layers=2):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.layers = nn.ModuleList(Layer(dim) for _ in range(layers))
        self.head = nn.Linear(dim, VOCAB)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class PromptDataset:
    """Prompts are single start tokens; the sampler walks up or down from there."""

    def __init__(self, seed):
        self.seed = seed

    def responses(self, step, prompt, n_prompts, n_samples):
        g = torch.Generator().manual_seed(self.seed * 9973 + step * n_prompts + prompt)
        start = torch.randint(VOCAB, (1,), generator=g)
        moves = torch.randint(-1, 3, (n_samples, LENGTH), generator=g)
        walk = (start + torch.cat([torch.zeros(n_samples, 1, dtype=torch.long), moves.cumsum(1)], 1)) % VOCAB
        reward = (moves == 1).float().mean(1) + 0.2 * (walk[:, -1] == 0).float()
        return walk, reward


def data_preparation_thread(dataset, args, rank, world, packed_queue, stop, num_training_steps, resume_training_step):
    for training_step in range(resume_training_step, num_training_steps + 1):
        walks, advantages, rewards = [], [], []
        for prompt in range(rank, args.prompts, world):
            walk, reward = dataset.responses(training_step, prompt, args.prompts, args.samples_per_prompt)
            walks.append(walk)
            rewards.append(reward)
            advantages.append((reward - reward.mean()) / (reward.std() + 1e-4))
        batch = {
            "sequences": torch.cat(walks),
            "advantages": torch.cat(advantages),
            "reward": torch.cat(rewards).mean(),
        }
        while True:
            if stop.is_set():
                return
            try:
                packed_queue.put(batch, timeout=0.2)
                break
            except Full:
                continue


def save_checkpoint(path, model, optimizer, step):
    model_sd, optim_sd = get_state_dict(model, optimizer)
    dcp.save({"model": model_sd, "optim": optim_sd, "training_step": step}, checkpoint_id=path)


def load_checkpoint(path, model, optimizer):
    model_sd, optim_sd = get_state_dict(model, optimizer)
    state = {"model": model_sd, "optim": optim_sd, "training_step": 0}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    return state["training_step"]


def main():
    args = parse_args()
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    mesh = init_device_mesh(device.type, (world,))

    torch.manual_seed(args.seed)
    policy = Policy().to(device)
    for layer in policy.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(policy, mesh=mesh)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=args.lr, weight_decay=0.01)

    resume_training_step = 1
    if args.resume:
        resume_training_step = load_checkpoint(args.ckpt, policy, optimizer) + 1
        if rank == 0:
            print(f"resuming at training step {resume_training_step}")

    packed_queue = Queue(maxsize=args.async_steps)
    stop = threading.Event()
    dataset = PromptDataset(args.seed)
    thread = threading.Thread(
        target=data_preparation_thread,
        args=(dataset, args, rank, world, packed_queue, stop, args.num_training_steps, resume_training_step),
        daemon=True,
    )
    thread.start()

    for training_step in range(resume_training_step, args.num_training_steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = args.lr * (1 - (training_step - 1) / args.num_training_steps)
        batch = packed_queue.get()
        seqs = batch["sequences"].to(device)
        logits = policy(seqs[:, :-1])
        logprobs = logits.log_softmax(-1).gather(-1, seqs[:, 1:, None]).squeeze(-1)
        loss = -(batch["advantages"].to(device)[:, None] * logprobs).mean()
        loss.backward()
        grad_norm = nn.utils.clip_grad_norm_(policy.parameters(), 0.5).full_tensor()
        optimizer.step()
        optimizer.zero_grad()

        stats = torch.stack([loss.detach(), batch["reward"].to(device)])
        dist.all_reduce(stats)
        if rank == 0:
            loss_value, reward = (stats / world).tolist()
            print(
                f"step {training_step:2d} loss {loss_value:.6f} reward {reward:.4f} "
                f"grad_norm {grad_norm.item():.5f}",
                flush=True,
            )
        if args.ckpt and args.save_every and training_step % args.save_every == 0:
            save_checkpoint(args.ckpt, policy, optimizer, training_step)

    stop.set()
    thread.join()
    weight = sum(p.full_tensor().double().abs().sum() for p in policy.parameters()).item()
    if rank == 0:
        print(f"done |w| {weight:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
