"""Language-model training on packed variable-length sequences with micro batches."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

SEED, STEPS, BATCH, MICRO = 23, 40, 16, 4
VOCAB, MAX_LEN, DIM, LAYERS, HEADS = 16, 14, 24, 2, 2
LR = 5e-3


def sequence(index):
    """A walk x -> a * x + b (mod VOCAB) with its own a and b; they have to be found in context."""
    g = torch.Generator().manual_seed(SEED * 65537 + index)
    length = int(torch.randint(5, MAX_LEN + 1, (1,), generator=g))
    a = [1, 3, 5][int(torch.randint(3, (1,), generator=g))]
    b, x = (int(v) for v in torch.randint(VOCAB, (2,), generator=g))
    out = [x]
    for _ in range(length - 1):
        x = (a * x + b) % VOCAB
        out.append(x)
    return out


def padded_batch(indices):
    rows = [sequence(i) for i in indices]
    width = max(map(len, rows))
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    loss_mask = torch.zeros(len(rows), width)
    for r, row in enumerate(rows):
        ids[r, : len(row)] = torch.tensor(row)
        mask[r, : len(row)] = True
        loss_mask[r, 2 : len(row)] = 1.0
    return {"input_ids": ids, "attention_mask": mask, "loss_mask": loss_mask}


def pack_tensor_dict(data):
    """[B, S] tensors to [1, total] tensors plus the boundaries of the sequences."""
    valid = data["attention_mask"]
    lens = valid.sum(1)
    packed = {
        "cu_seqlens": F.pad(lens.cumsum(0), (1, 0)),
        "position_ids": torch.cat([torch.arange(n, device=lens.device) for n in lens.tolist()])[None],
    }
    for key, value in data.items():
        if key == "attention_mask":
            continue
        packed[key] = value[valid][None]
    return packed


def attention_bias(x, attention_mask=None, cu_seqlens=None):
    total = x.shape[1]
    causal = torch.ones(total, total, dtype=torch.bool, device=x.device).tril()
    if attention_mask is not None:
        return causal & attention_mask[:, None, None, :]
    if cu_seqlens is not None:
        seq_id = torch.bucketize(torch.arange(total, device=x.device), cu_seqlens[1:], right=True)
        return causal & (seq_id[:, None] == seq_id[None, :])
    return causal


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.o = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))

    def forward(self, x, bias):
        b, t, _ = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, HEADS, DIM // HEADS).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        x = x + self.o(y.transpose(1, 2).reshape(b, t, DIM))
        return x + self.mlp(self.n2(x))


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok, self.pos = nn.Embedding(VOCAB, DIM), nn.Embedding(MAX_LEN, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB)

    def forward(self, input_ids, position_ids, attention_mask=None, cu_seqlens=None):
        x = self.tok(input_ids) + self.pos(position_ids)
        bias = attention_bias(x, attention_mask, cu_seqlens)
        for block in self.blocks:
            x = block(x, bias)
        return self.head(self.norm(x))


def packed_loss(model, mb):
    inputs = {k: mb[k] for k in ("input_ids", "position_ids", "attention_mask", "cu_seqlens") if k in mb}
    logits = model(**inputs)
    labels = torch.roll(mb["input_ids"], -1, dims=-1)
    # loss_mask marks tokens to be predicted; the last token of a sequence has no successor
    weights = torch.roll(mb["loss_mask"], -1, dims=-1)
    weights[:, mb["cu_seqlens"][1:] - 1] = 0
    nll = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return (nll * weights.flatten()).sum()


def split_micro_batches(data, size):
    n = len(data["input_ids"])
    return [pack_tensor_dict({k: v[i : i + size] for k, v in data.items()}) for i in range(0, n, size)]


def main():
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    mesh = init_device_mesh(device.type, (world,))
    torch.manual_seed(SEED)
    model = LM().to(device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=STEPS)

    for step in range(STEPS):
        data = padded_batch([step * BATCH + i for i in range(rank, BATCH, world)])
        data = {k: v.to(device) for k, v in data.items()}
        n_tokens = data["loss_mask"].sum()
        dist.all_reduce(n_tokens)
        total = torch.zeros((), device=device)
        for mb in split_micro_batches(data, MICRO):
            loss = packed_loss(model, mb)
            (loss * world / n_tokens).backward()
            total += loss.detach()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        if rank == 0 and (step % 5 == 0 or step == STEPS - 1):
            print(f"step {step:3d} loss {(total / n_tokens).item():.6f} grad_norm {norm.item():.5f}", flush=True)

    weight = sum(p.full_tensor().double().abs().sum() for p in model.parameters()).item()
    if rank == 0:
        print(f"|w| {weight:.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
