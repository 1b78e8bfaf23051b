"""Supervised warm-up of an arithmetic policy, the stage before RL.

    torchrun --nproc-per-node 2 train.py
    torchrun --nproc-per-node 2 train.py --ckpt /tmp/arith --save-every 6
    torchrun --nproc-per-node 2 train.py --ckpt /tmp/arith --resume

Sharded checkpoints go to CKPT/step_N; at the end the newest one is turned into
a single file that the rollout workers read.
"""

import argparse
import json
import os
import shutil

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

TOKENS = list("0123456789+=. ")
WIDTH, DEPTH, LENGTH = 32, 2, 10
BATCH = 16


def encode(text):
    return [TOKENS.index(c) for c in text]


def problems(step, rank, world):
    g = torch.Generator().manual_seed(77_000 + step)
    a = torch.randint(0, 30, (BATCH, 2), generator=g).tolist()
    rows, masks = [], []
    for x, y in a[rank * BATCH // world : (rank + 1) * BATCH // world]:
        question, answer = f"{x}+{y}=", f"{x + y}."
        row = encode(question + answer)
        mask = [0.0] * len(question) + [1.0] * len(answer)
        pad = LENGTH + 1 - len(row)
        rows.append(row + encode(" ") * pad)
        masks.append(mask + [0.0] * pad)
    return torch.tensor(rows), torch.tensor(masks)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x, mask):
        h = self.ln1(x)
        x = x + self.attn(h, h, h, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(self.ln2(x))


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(len(TOKENS), WIDTH)
        self.position = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, len(TOKENS))

    def forward(self, ids):
        t = ids.shape[1]
        mask = torch.ones(t, t, dtype=torch.bool, device=ids.device).triu(1)
        x = self.embed(ids) + self.position(torch.arange(t, device=ids.device))
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)


def step_dir(ckpt, step):
    return os.path.join(ckpt, f"step_{step}")


def newest(ckpt):
    steps = [int(d.split("_")[1]) for d in os.listdir(ckpt) if d.startswith("step_")]
    return max(s for s in steps if os.path.exists(os.path.join(step_dir(ckpt, s), "train_info.json")))


def save_checkpoint(model, optimizer, scheduler, step, ckpt):
    path = step_dir(ckpt, step)
    dcp.save(get_model_state_dict(model), checkpoint_id=os.path.join(path, "model"))
    dcp.save(get_optimizer_state_dict(model, optimizer), checkpoint_id=os.path.join(path, "optimizer"))
    if dist.get_rank() == 0:
        with open(os.path.join(path, "train_info.json"), "w") as f:
            json.dump({"step": step, "scheduler": scheduler.state_dict()}, f)
    dist.barrier()


def load_checkpoint(model, optimizer, scheduler, ckpt):
    path = step_dir(ckpt, newest(ckpt))
    weights = get_model_state_dict(model)
    dcp.load(weights, checkpoint_id=os.path.join(path, "model"))
    set_model_state_dict(model, weights)
    moments = get_optimizer_state_dict(model, optimizer)
    dcp.load(moments, checkpoint_id=os.path.join(path, "optimizer"))
    set_optimizer_state_dict(model, optimizer, moments)
    with open(os.path.join(path, "train_info.json")) as f:
        info = json.load(f)
    scheduler.load_state_dict(info["scheduler"])
    return info["step"]


def export_for_rollout(ckpt, step, overwrite=True):
    """Writes the weights of a sharded checkpoint as one file with a small config."""
    out = os.path.join(ckpt, "rollout")
    if os.path.exists(out):
        if not overwrite:
            raise FileExistsError(out)
        shutil.rmtree(out)
    os.makedirs(out)
    weights_path = os.path.join(out, "policy.bin")
    dcp_to_torch_save(os.path.join(step_dir(ckpt, step), "model"), weights_path)

    # reload to write plain contiguous tensors
    state_dict = torch.load(weights_path)
    state_dict = {k: v.contiguous() for k, v in state_dict.items()}
    torch.save(state_dict, weights_path)
    with open(os.path.join(out, "config.json"), "w") as f:
        json.dump({"tokens": TOKENS, "width": WIDTH, "depth": DEPTH, "step": step}, f)
    size = sum(v.numel() for v in state_dict.values())
    print(f"exported {size} parameters of step {step}", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--ckpt", default=None)
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)

    torch.manual_seed(5)
    model = Policy().to(device)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.steps)

    step = load_checkpoint(model, optimizer, scheduler, args.ckpt) if args.resume else 0
    saved = step
    while step < args.steps:
        ids, mask = (t.to(device) for t in problems(step, rank, world))
        count = mask[:, 1:].sum()
        dist.all_reduce(count)
        nll = nn.functional.cross_entropy(model(ids[:, :-1]).transpose(1, 2), ids[:, 1:], reduction="none")
        # answers differ in length: normalise by the tokens of the whole batch
        loss = (nll * mask[:, 1:]).sum() / count
        (loss * world).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        step += 1

        total = loss.detach().clone()
        dist.all_reduce(total)
        if rank == 0:
            print(f"step {step} loss {total.item():.6f} grad {norm.item():.5f}", flush=True)
        if args.ckpt and args.save_every and step % args.save_every == 0:
            save_checkpoint(model, optimizer, scheduler, step, args.ckpt)
            saved = step

    if args.ckpt and saved:
        if rank == 0:
            export_for_rollout(args.ckpt, saved)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
