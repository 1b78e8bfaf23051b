"""Fine-tune a small masked-text encoder with a warmup schedule (FSDP2)."""
import argparse
import json
import math
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import LambdaLR

VOCAB, LENGTH, DIM = 32, 12, 24


class MixerBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(DIM)
        self.mix = nn.Linear(LENGTH, LENGTH)
        self.norm2 = nn.LayerNorm(DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 3 * DIM), nn.GELU(), nn.Linear(3 * DIM, DIM))

    def forward(self, x):
        x = x + self.mix(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.mlp(self.norm2(x))


class MaskedEncoder(nn.Module):
    def __init__(self, depth=2):
        super().__init__()
        self.embed = nn.Embedding(VOCAB + 1, DIM)
        self.blocks = nn.ModuleList(MixerBlock() for _ in range(depth))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def get_lr_scheduler(args, optimizer, last_epoch=-1):
    """The schedule named by --lr-scheduler."""
    warmup = args.lr_warmup_steps
    total = args.max_train_steps

    if args.lr_scheduler == "constant_with_warmup":
        fn = lambda s: min(1.0, (s + 1) / max(1, warmup))
    elif args.lr_scheduler == "polynomial":

        def fn(s):
            if s < warmup:
                return (s + 1) / max(1, warmup)
            left = 1 - (s - warmup) / max(1, total - warmup)
            return args.lr_end / args.learning_rate + (1 - args.lr_end / args.learning_rate) * max(0.0, left)

    elif args.lr_scheduler == "cosine":

        def fn(s):
            if s < warmup:
                return (s + 1) / max(1, warmup)
            return 0.5 * (1 + math.cos(math.pi * min(1.0, (s - warmup) / max(1, total - warmup))))

    else:
        raise ValueError(f"unknown schedule {args.lr_scheduler}")
    return LambdaLR(optimizer, fn, last_epoch)


def masked_batch(step, size):
    g = torch.Generator().manual_seed(31 * 4096 + step)
    base = torch.randint(VOCAB, (size, 1), generator=g)
    ids = (base + torch.arange(LENGTH)) % VOCAB
    # the same number of hidden positions in every sequence
    hidden = torch.rand(size, LENGTH, generator=g).argsort(1)[:, :3]
    mask = torch.zeros(size, LENGTH, dtype=torch.bool).scatter_(1, hidden, True)
    return torch.where(mask, VOCAB, ids), ids, mask


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--max-train-steps", type=int, default=16)
    ap.add_argument("--train-batch-size", type=int, default=32, help="over all processes")
    ap.add_argument("--learning-rate", type=float, default=2e-2)
    ap.add_argument("--lr-end", type=float, default=1e-4)
    ap.add_argument("--lr-scheduler", default="polynomial")
    ap.add_argument("--lr-warmup-steps", type=int, default=4)
    ap.add_argument("--checkpointing-steps", type=int, default=0)
    ap.add_argument("--output-dir", default=None)
    ap.add_argument("--resume", action="store_true")
    args = ap.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, num_processes = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)

    torch.manual_seed(8)
    model = MaskedEncoder().to(device)
    mesh = init_device_mesh(device.type, (num_processes,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=1e-2)
    lr_scheduler = get_lr_scheduler(args, optimizer)

    global_step = 0
    if args.resume:
        model_sd, optim_sd = get_state_dict(model, optimizer)
        dcp.load({"model": model_sd, "optimizer": optim_sd}, checkpoint_id=os.path.join(args.output_dir, "weights"))
        set_state_dict(model, optimizer, model_state_dict=model_sd, optim_state_dict=optim_sd)
        with open(os.path.join(args.output_dir, "trainer_state.json")) as f:
            saved = json.load(f)
        global_step = saved["global_step"]
        lr_scheduler.load_state_dict(saved["lr_scheduler"])

    while global_step < args.max_train_steps:
        ids, target, mask = (t[rank::num_processes].to(device) for t in masked_batch(global_step, args.train_batch_size))
        loss = nn.functional.cross_entropy(model(ids)[mask], target[mask])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        lr = lr_scheduler.get_last_lr()[0]
        lr_scheduler.step()
        optimizer.zero_grad()
        global_step += 1

        total = loss.detach().clone()
        dist.all_reduce(total)
        if rank == 0:
            print(f"{global_step:3d}/{args.max_train_steps} loss={total.item() / num_processes:.6f} lr={lr:.3e}", flush=True)

        if args.checkpointing_steps and global_step % args.checkpointing_steps == 0:
            model_sd, optim_sd = get_state_dict(model, optimizer)
            dcp.save({"model": model_sd, "optimizer": optim_sd}, checkpoint_id=os.path.join(args.output_dir, "weights"))
            if rank == 0:
                state = {k: v for k, v in lr_scheduler.state_dict().items() if k != "lr_lambdas"}
                state["lr_lambdas"] = [None] * len(lr_scheduler.lr_lambdas)
                with open(os.path.join(args.output_dir, "trainer_state.json"), "w") as f:
                    json.dump({"global_step": global_step, "lr_scheduler": state}, f)
            dist.barrier()

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
