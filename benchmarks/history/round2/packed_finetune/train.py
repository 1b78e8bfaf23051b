"""Instruction finetuning with sample packing, a streaming dataset and resumable checkpoints.

    torchrun --nproc-per-node 2 train.py --save-folder ckpt --save-interval 8
    torchrun --nproc-per-node 2 train.py --save-folder ckpt --autoresume
"""
import argparse
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

VOCAB = 40
IGNORE = -100


@dataclass
class Timestamp:
    batch: int = 0
    sample: int = 0
    token: int = 0


class StreamingFinetuningDataset:
    """Prompt/response pairs; the order of an epoch depends on the seed and the epoch only."""

    def __init__(self, size, seed, packing_ratio):
        g = torch.Generator().manual_seed(seed)
        self.size, self.seed, self.packing_ratio = size, seed, packing_ratio
        self.lengths = torch.randint(3, 6, (size, 2), generator=g)
        self.first = torch.randint(1, VOCAB, (size,), generator=g)
        self.stride = torch.randint(1, 4, (size,), generator=g)
        self.epoch, self.sample_in_epoch = 0, 0

    def example(self, i):
        n_prompt, n_response = self.lengths[i].tolist()
        ids = (self.first[i] + self.stride[i] * torch.arange(n_prompt + n_response)) % (VOCAB - 1) + 1
        labels = ids.clone()
        labels[:n_prompt] = IGNORE
        return ids, labels

    def read(self, count):
        """The next `count` examples of the stream."""
        if self.sample_in_epoch + count > self.size:
            self.epoch, self.sample_in_epoch = self.epoch + 1, 0
        order = torch.randperm(self.size, generator=torch.Generator().manual_seed(self.seed + self.epoch))
        picked = order[self.sample_in_epoch:self.sample_in_epoch + count]
        self.sample_in_epoch += count
        return [self.example(int(i)) for i in picked]

    def state_dict(self, num_samples):
        """State after `num_samples` samples have been trained on since the beginning."""
        num_samples = int(self.packing_ratio * num_samples)
        per_epoch = self.size
        return {"epoch": num_samples // per_epoch, "sample_in_epoch": num_samples % per_epoch}

    def load_state_dict(self, state):
        self.epoch, self.sample_in_epoch = state["epoch"], state["sample_in_epoch"]


class PackingCollator:
    """Packs a fixed number of examples into every row of the batch."""

    def __init__(self, max_seq_len, packing_ratio):
        self.max_seq_len, self.packing_ratio = max_seq_len, packing_ratio

    def __call__(self, examples):
        rows = len(examples) // self.packing_ratio
        ids = torch.zeros(rows, self.max_seq_len, dtype=torch.long)
        labels = torch.full_like(ids, IGNORE)
        sequence_id = torch.full_like(ids, -1)
        position = torch.zeros_like(ids)
        for row in range(rows):
            at = 0
            for k, (x, y) in enumerate(examples[row * self.packing_ratio:(row + 1) * self.packing_ratio]):
                end = at + x.numel()
                ids[row, at:end], labels[row, at:end] = x, y
                labels[row, at] = IGNORE
                sequence_id[row, at:end] = k
                position[row, at:end] = torch.arange(x.numel())
                at = end
        return {"input_ids": ids, "labels": labels, "sequence_id": sequence_id, "position": position}


class TrainLoader:
    def __init__(self, dataset, collator, global_batch_size):
        self.dataset, self.collator = dataset, collator
        self.global_batch_size = global_batch_size
        self.dataset_batch_size = global_batch_size * collator.packing_ratio

    def __iter__(self):
        rank, world = dist.get_rank(), dist.get_world_size()
        while True:
            batch = self.collator(self.dataset.read(self.dataset_batch_size))
            yield {k: v[rank::world] for k, v in batch.items()}


class MPTBlock(nn.Module):
    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.norm_1, self.norm_2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.Wqkv = nn.Linear(d_model, 3 * d_model)
        self.out_proj = nn.Linear(d_model, d_model)
        self.ffn = nn.Sequential(nn.Linear(d_model, 2 * d_model), nn.GELU(), nn.Linear(2 * d_model, d_model))

    def forward(self, x, mask):
        b, t, d = x.shape
        q, k, v = self.Wqkv(self.norm_1(x)).view(b, t, 3, self.n_heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out_proj(y.transpose(1, 2).reshape(b, t, d))
        return x + self.ffn(self.norm_2(x))


class MPT(nn.Module):
    def __init__(self, d_model=32, n_layers=2, n_heads=2, max_seq_len=48):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, d_model), nn.Embedding(max_seq_len, d_model)
        self.blocks = nn.ModuleList(MPTBlock(d_model, n_heads) for _ in range(n_layers))
        self.norm_f = nn.LayerNorm(d_model)
        self.head = nn.Linear(d_model, VOCAB, bias=False)

    def forward(self, input_ids, sequence_id, position):
        same = sequence_id[:, :, None] == sequence_id[:, None, :]
        mask = (same & torch.ones_like(same[0]).tril()).unsqueeze(1)
        x = self.wte(input_ids) + self.wpe(position)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm_f(x))


def save_checkpoint(folder, model, optimizer, timestamp, loader):
    model_sd, optim_sd = get_state_dict(model, optimizer)
    state = {"model": model_sd, "optim": optim_sd, "timestamp": asdict(timestamp),
             "dataset": loader.dataset.state_dict(num_samples=timestamp.sample)}
    dcp.save(state, checkpoint_id=str(Path(folder) / f"ba{timestamp.batch}"))


def load_latest_checkpoint(folder, model, optimizer, timestamp, loader):
    found = sorted(Path(folder).glob("ba*"), key=lambda p: int(p.name[2:]))
    if not found:
        return
    model_sd, optim_sd = get_state_dict(model, optimizer)
    state = {"model": model_sd, "optim": optim_sd, "timestamp": asdict(timestamp),
             "dataset": loader.dataset.state_dict(num_samples=0)}
    dcp.load(state, checkpoint_id=str(found[-1]))
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    for name, value in state["timestamp"].items():
        setattr(timestamp, name, value)
    loader.dataset.load_state_dict(state["dataset"])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--max-duration", type=int, default=15, help="batches")
    parser.add_argument("--global-train-batch-size", type=int, default=8, help="packed rows")
    parser.add_argument("--packing-ratio", type=int, default=4)
    parser.add_argument("--max-seq-len", type=int, default=40)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--save-folder")
    parser.add_argument("--save-interval", type=int, default=0)
    parser.add_argument("--autoresume", action="store_true")
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device.type, (world,))

    torch.manual_seed(17)
    model = MPT(max_seq_len=args.max_seq_len).to(device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)

    dataset = StreamingFinetuningDataset(1024, seed=9176, packing_ratio=args.packing_ratio)
    loader = TrainLoader(dataset, PackingCollator(args.max_seq_len, args.packing_ratio), args.global_train_batch_size)
    timestamp = Timestamp()
    if args.autoresume:
        load_latest_checkpoint(args.save_folder, model, optimizer, timestamp, loader)

    for batch in loader:
        if timestamp.batch >= args.max_duration:
            break
        batch = {k: v.to(device) for k, v in batch.items()}
        labels = batch.pop("labels")
        targets = (labels != IGNORE).sum()
        dist.all_reduce(targets)
        logits = model(**batch)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORE,
                               reduction="sum") / targets
        (loss * world).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

        timestamp.batch += 1
        timestamp.sample += args.global_train_batch_size
        timestamp.token += int(targets)
        loss = loss.detach()
        dist.all_reduce(loss)
        if rank == 0:
            print(f"ba {timestamp.batch} sample {timestamp.sample} token {timestamp.token} "
                  f"loss {loss.item():.6f}", flush=True)
        if args.save_interval and timestamp.batch % args.save_interval == 0:
            save_checkpoint(args.save_folder, model, optimizer, timestamp, loader)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
