"""Supervised fine-tuning on conversations of very different length (loss on answers only)."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

VOCAB, MAX_LEN, IGNORE = 36, 20, -100


class Layer(nn.Module):
    def __init__(self, dim, heads=2):
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 3 * dim), nn.GELU(), nn.Linear(3 * dim, dim))

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (z.view(b, t, self.heads, -1).transpose(1, 2)
                   for z in self.qkv(self.ln1(x)).chunk(3, dim=-1))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(a.transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.ln2(x))


class ChatLM(nn.Module):
    def __init__(self, dim=24, layers=3):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, dim)
        self.pos = nn.Embedding(MAX_LEN, dim)
        self.layers = nn.ModuleList(Layer(dim) for _ in range(layers))
        self.ln = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, VOCAB, bias=False)

    def forward(self, ids):
        x = self.tok(ids) + self.pos(torch.arange(ids.size(1), device=ids.device))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.ln(x))


def conversations(n, seed):
    """n padded conversations; labels are IGNORE on the question and on the padding."""
    gen = torch.Generator().manual_seed(seed)
    ids = torch.zeros(n, MAX_LEN + 1, dtype=torch.long)
    labels = torch.full((n, MAX_LEN + 1), IGNORE)
    for i in range(n):
        short = torch.rand((), generator=gen) < 0.6
        answer = int(torch.randint(1, 4, (), generator=gen)) if short else \
            int(torch.randint(10, 17, (), generator=gen))
        question = torch.randint(1, VOCAB, (3,), generator=gen)
        # short answers repeat the question, long ones count up from it
        step = 0 if short else 1
        reply = (question[-1] + step * torch.arange(1, answer + 1)) % VOCAB
        ids[i, :3], ids[i, 3:3 + answer] = question, reply
        labels[i, 3:3 + answer] = reply
    return ids[:, :-1], labels[:, 1:]


def token_loss(model, ids, labels):
    """Summed cross entropy over the answer tokens."""
    logits = model(ids)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE,
                           reduction="sum")


class SFTTrainer:
    def __init__(self, args, device):
        self.args, self.device = args, device
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(args.seed)
        self.model = ChatLM().to(device)
        for layer in self.model.layers:
            fully_shard(layer)
        fully_shard(self.model)
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=args.lr, weight_decay=0.0)

    def micro_batches(self, step):
        ids, labels = conversations(self.args.batch_size, 40 + step)
        ids, labels = ids[self.rank::self.world], labels[self.rank::self.world]
        return list(zip(ids.to(self.device).chunk(self.args.accumulation),
                        labels.to(self.device).chunk(self.args.accumulation)))

    def training_step(self, step):
        batches = self.micro_batches(step)
        num_items = sum(labels.ne(IGNORE).sum() for _, labels in batches)
        dist.all_reduce(num_items)
        loss_sum = torch.zeros((), device=self.device)
        for i, (ids, labels) in enumerate(batches):
            self.model.set_requires_gradient_sync(i == len(batches) - 1)
            # gradients are averaged over the ranks, hence the factor world
            loss = token_loss(self.model, ids, labels) * self.world / num_items
            loss.backward()
            loss_sum += loss.detach()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.args.clip)
        self.opt.step()
        self.opt.zero_grad()
        dist.all_reduce(loss_sum)
        return loss_sum.item() / self.world

    @torch.no_grad()
    def evaluate(self, n=64):
        ids, labels = conversations(n, 7)
        ids = ids[self.rank::self.world].to(self.device)
        labels = labels[self.rank::self.world].to(self.device)
        stats = torch.stack([token_loss(self.model, ids, labels), labels.ne(IGNORE).sum().float()])
        dist.all_reduce(stats)
        return (stats[0] / stats[1]).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=16, help="conversations a step")
    parser.add_argument("--accumulation", type=int, default=4)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=11)
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    trainer = SFTTrainer(args, device)
    for step in range(args.steps):
        loss = trainer.training_step(step)
        if trainer.rank == 0 and (step + 1) % 8 == 0:
            print(f"step {step + 1:3d}  loss {loss:.6f}", flush=True)
    loss = trainer.evaluate()
    if trainer.rank == 0:
        print(f"held-out loss per answer token {loss:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
