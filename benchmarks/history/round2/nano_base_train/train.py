"""Base pretraining of a tiny GPT: streaming shards of documents, gradient accumulation, resume.

torchrun --nproc-per-node 2 train.py --save-every 8 --checkpoint-dir out
torchrun --nproc-per-node 2 train.py --resume --checkpoint-dir out
"""
import argparse
import math
import os
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

parser = argparse.ArgumentParser()
parser.add_argument("--depth", type=int, default=2)
parser.add_argument("--n-embd", type=int, default=32)
parser.add_argument("--max-seq-len", type=int, default=24)
parser.add_argument("--device-batch-size", type=int, default=4)
parser.add_argument("--total-batch-size", type=int, default=16, help="sequences per step")
parser.add_argument("--num-iterations", type=int, default=15)
parser.add_argument("--matrix-lr", type=float, default=8e-3)
parser.add_argument("--embedding-lr", type=float, default=2e-2)
parser.add_argument("--warmdown-ratio", type=float, default=0.3)
parser.add_argument("--grad-clip", type=float, default=1.0)
parser.add_argument("--eval-every", type=int, default=5)
parser.add_argument("--checkpoint-dir", type=str, default="")
parser.add_argument("--save-every", type=int, default=0)
parser.add_argument("--resume", action="store_true")
args = parser.parse_args()

VOCAB_SIZE = 28  # <bos>, a-z, space


# -----------------------------------------------------------------------------
# data

class Shard:
    """Stand-in for a parquet file: a number of row groups, each a list of documents."""
    num_row_groups = 8

    def __init__(self, index):
        self.index = index

    def read_row_group(self, rg_idx, rows):
        g = torch.Generator().manual_seed(self.index * 1000 + rg_idx)
        docs = []
        for _ in range(rows):
            word = [chr(97 + c) for c in torch.randint(0, 26, (4,), generator=g).tolist()]
            docs.append(" ".join("".join(word[i:] + word[:i]) for i in range(4)) + " " + "".join(word) * 2)
        return docs


def list_shards():
    return [Shard(i) for i in range(6)]


def encode(text):
    return [0] + [27 if c == " " else ord(c) - 96 for c in text]


def distributed_data_loader_with_state(B, T, split, device, resume_state_dict=None):
    """
    Yields (inputs, targets, state) forever.  The row groups of a shard are dealt out to the
    ranks in turn; `state` names the shard and row group the batch came from and can be given
    back as `resume_state_dict` to go on after it.
    """
    ddp_rank, ddp_world_size = dist.get_rank(), dist.get_world_size()

    def document_batches():
        shards = list_shards()
        shards = shards[:-1] if split == "train" else shards[-1:]
        pq_idx = resume_state_dict["pq_idx"] if resume_state_dict is not None else 0
        resume_rg_idx = resume_state_dict["rg_idx"] if resume_state_dict is not None else None
        while True:  # iterate infinitely (multi-epoch)
            while pq_idx < len(shards):  # iterate over all shards
                shard = shards[pq_idx]
                if resume_rg_idx is not None:
                    # continue with the round of row groups after the one in the state
                    rg_idx = (resume_rg_idx // ddp_world_size + 1) * ddp_world_size + ddp_rank
                    resume_rg_idx = None
                else:
                    rg_idx = ddp_rank
                while rg_idx < shard.num_row_groups:
                    yield shard.read_row_group(rg_idx, B), {"pq_idx": pq_idx, "rg_idx": rg_idx}
                    rg_idx += ddp_world_size  # advance to this rank's next row group
                pq_idx += 1  # advance to the next shard
            pq_idx = 0

    for documents, state in document_batches():
        tokens = torch.tensor([encode(doc)[:T + 1] for doc in documents])
        yield tokens[:, :-1].to(device), tokens[:, 1:].to(device), state


# -----------------------------------------------------------------------------
# model

def norm(x):
    return F.rms_norm(x, (x.size(-1),))


class Block(nn.Module):
    def __init__(self, n_embd, n_head=2):
        super().__init__()
        self.n_head = n_head
        self.c_qkv = nn.Linear(n_embd, 3 * n_embd, bias=False)
        self.c_proj = nn.Linear(n_embd, n_embd, bias=False)
        self.c_fc = nn.Linear(n_embd, 4 * n_embd, bias=False)
        self.c_out = nn.Linear(4 * n_embd, n_embd, bias=False)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.c_qkv(norm(x)).view(b, t, 3, self.n_head, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(norm(q), norm(k), v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).reshape(b, t, d))
        return x + self.c_out(F.relu(self.c_fc(norm(x))).square())


class GPT(nn.Module):
    def __init__(self, depth, n_embd, max_seq_len):
        super().__init__()
        self.wte = nn.Embedding(VOCAB_SIZE, n_embd)
        self.wpe = nn.Embedding(max_seq_len, n_embd)
        self.h = nn.ModuleList(Block(n_embd) for _ in range(depth))
        self.lm_head = nn.Linear(n_embd, VOCAB_SIZE, bias=False)

    def forward(self, idx, targets):
        x = norm(self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device)))
        for block in self.h:
            x = block(x)
        logits = 15 * torch.tanh(self.lm_head(norm(x)) / 15)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


# -----------------------------------------------------------------------------
# training

def get_lr_multiplier(it):
    warmdown = round(args.warmdown_ratio * args.num_iterations)
    return min(1.0, (args.num_iterations - it) / max(1, warmdown))


@torch.no_grad()
def evaluate_bits_per_char(model, device, steps):
    loader = distributed_data_loader_with_state(args.device_batch_size, args.max_seq_len, "val", device)
    total = torch.zeros((), device=device)
    for _ in range(steps):
        x, y, _ = next(loader)
        total += model(x, y)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size() / steps / math.log(2)


def checkpoint_state(model, optimizer, meta):
    model_data, optimizer_data = get_state_dict(model, optimizer)
    return {"model": model_data, "optimizer": optimizer_data, "meta": meta}


def main():
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    ddp_rank, ddp_world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    mesh = init_device_mesh(device.type, (ddp_world_size,))

    torch.manual_seed(42)
    model = GPT(args.depth, args.n_embd, args.max_seq_len).to(device)
    for block in model.h:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    embedding = [p for n, p in model.named_parameters() if n.startswith("w")]
    matrix = [p for n, p in model.named_parameters() if not n.startswith("w")]
    optimizer = torch.optim.AdamW([
        {"params": embedding, "lr": args.embedding_lr, "initial_lr": args.embedding_lr},
        {"params": matrix, "lr": args.matrix_lr, "initial_lr": args.matrix_lr},
    ], betas=(0.8, 0.95), weight_decay=0.0)

    grad_accum_steps = args.total_batch_size // (args.device_batch_size * ddp_world_size)
    step, loader_state = 0, None
    if args.resume:
        last = max(int(d[5:]) for d in os.listdir(args.checkpoint_dir) if d.startswith("step_"))
        state = checkpoint_state(model, optimizer, {"step": 0, "loader": {"pq_idx": 0, "rg_idx": 0}})
        dcp.load(state, checkpoint_id=os.path.join(args.checkpoint_dir, f"step_{last:06d}"))
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        step, loader_state = state["meta"]["step"], state["meta"]["loader"]
    train_loader = distributed_data_loader_with_state(
        args.device_batch_size, args.max_seq_len, "train", device, resume_state_dict=loader_state)

    while step < args.num_iterations:
        t0 = time.time()
        train_loss = torch.zeros((), device=device)
        for micro_step in range(grad_accum_steps):
            x, y, loader_state = next(train_loader)
            model.set_requires_gradient_sync(micro_step == grad_accum_steps - 1)
            loss = model(x, y) / grad_accum_steps
            loss.backward()
            train_loss += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip)
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * get_lr_multiplier(step)
        optimizer.step()
        model.zero_grad(set_to_none=True)
        step += 1

        dist.all_reduce(train_loss)
        if ddp_rank == 0:
            print(f"step {step:05d}/{args.num_iterations:05d} | loss: {train_loss.item() / ddp_world_size:.6f} | "
                  f"dt: {(time.time() - t0) * 1000:.0f}ms | shard: {loader_state['pq_idx']}", flush=True)
        if args.save_every and step % args.save_every == 0:
            meta = {"step": step, "loader": loader_state}
            dcp.save(checkpoint_state(model, optimizer, meta),
                     checkpoint_id=os.path.join(args.checkpoint_dir, f"step_{step:06d}"))
        if step % args.eval_every == 0:
            bpc = evaluate_bits_per_char(model, device, steps=8 // ddp_world_size)
            if ddp_rank == 0:
                print(f"step {step:05d} | validation bits per char: {bpc:.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
