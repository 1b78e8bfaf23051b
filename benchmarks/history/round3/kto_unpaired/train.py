"""KTO on unpaired feedback: a small decoder is aligned with desirable and undesirable answers."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

VOCAB, PAD, EOS, MAX_LEN = 18, 0, 1, 20


def parse_args():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=30)
    p.add_argument("--train_batch_size", type=int, default=16)
    p.add_argument("--beta", type=float, default=0.1)
    p.add_argument("--desirable_loss_weight", type=float, default=1.0)
    p.add_argument("--undesirable_loss_weight", type=float, default=1.0)
    p.add_argument("--learning_rate", type=float, default=2e-3)
    p.add_argument("--max_norm", type=float, default=1.0)
    p.add_argument("--seed", type=int, default=42)
    return p.parse_args()


class UnpairedDataset:
    """Prompts of varying length; good answers count upwards from the last prompt token."""

    def __init__(self, seed):
        self.seed = seed

    def __getitem__(self, index):
        g = torch.Generator().manual_seed(self.seed * 15485863 + index)
        prompt = torch.randint(2, VOCAB, (int(torch.randint(3, 11, (1,), generator=g)),), generator=g).tolist()
        label = int(torch.rand((), generator=g) < 0.5)
        n = int(torch.randint(3, 8, (1,), generator=g))
        if label:
            answer = [2 + (prompt[-1] - 2 + k) % (VOCAB - 2) for k in range(1, n + 1)]
        else:
            answer = torch.randint(2, VOCAB, (n,), generator=g).tolist()
        return prompt, answer + [EOS], label

    def collate(self, step, batch_size, rank, world):
        """Matched rows first, then the same prompts with the answer of the next sample (for the KL term)."""
        indices = [step * batch_size + i for i in range(rank, batch_size, world)]
        matched, unmatched = [], []
        for i in indices:
            prompt, answer, label = self[i]
            following = self[step * batch_size + (i + 1) % batch_size]
            matched.append((prompt, answer, label))
            unmatched.append((prompt, following[1], -1))
        rows = matched + unmatched
        input_ids = torch.full((len(rows), MAX_LEN), PAD)
        attention_mask = torch.zeros(len(rows), MAX_LEN, dtype=torch.bool)
        for r, (prompt, answer, _) in enumerate(rows):
            ids = (prompt + answer)[:MAX_LEN]
            input_ids[r, : len(ids)] = torch.tensor(ids)
            attention_mask[r, : len(ids)] = True
        labels = torch.tensor([label for _, _, label in rows])
        return input_ids, attention_mask, labels, [len(prompt) for prompt, _, _ in rows]


class Block(nn.Module):
    def __init__(self, dim, heads=2):
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.o = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(a.transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.ln2(x))


class Actor(nn.Module):
    def __init__(self, dim=24, layers=2):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, dim), nn.Embedding(MAX_LEN, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, VOCAB)

    def forward(self, ids):
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build(args, mesh, device):
    torch.manual_seed(args.seed)
    model = Actor().to(device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def get_batch_logps(logits, input_ids, attention_mask, prompt_ids_lens):
    loss_masks = attention_mask.clone()
    for mask, source_len in zip(loss_masks, prompt_ids_lens):
        mask[:source_len] = False
    logps = logits[:, :-1].log_softmax(-1).gather(-1, input_ids[:, 1:, None]).squeeze(-1)
    return (logps * loss_masks[:, 1:]).sum(-1)


def kto_loss(args, policy_logps, ref_logps, labels, world):
    rewards = policy_logps - ref_logps
    unmatched = labels == -1
    kl = rewards[unmatched].mean().detach()
    dist.all_reduce(kl)
    kl = (kl / world).clamp(min=0)
    chosen, rejected = rewards[labels == 1], rewards[labels == 0]
    losses = torch.cat(
        [
            args.desirable_loss_weight * (1 - F.sigmoid(args.beta * (chosen - kl))),
            args.undesirable_loss_weight * (1 - F.sigmoid(args.beta * (kl - rejected))),
        ]
    )
    sums = torch.stack([chosen.sum(), rejected.sum()]).detach() * args.beta
    counts = torch.tensor([len(chosen), len(rejected)], device=sums.device)
    return losses.mean(), kl, sums, counts


def main():
    args = parse_args()
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    mesh = init_device_mesh(device.type, (world,))
    model = build(args, mesh, device)
    ref_model = build(args, mesh, device).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    dataset = UnpairedDataset(args.seed)

    for step in range(args.steps):
        input_ids, attention_mask, labels, prompt_lens = dataset.collate(step, args.train_batch_size, rank, world)
        input_ids, attention_mask, labels = input_ids.to(device), attention_mask.to(device), labels.to(device)
        policy_logps = get_batch_logps(model(input_ids), input_ids, attention_mask, prompt_lens)
        with torch.no_grad():
            ref_logps = get_batch_logps(ref_model(input_ids), input_ids, attention_mask, prompt_lens)
        loss, kl, sums, counts = kto_loss(args, policy_logps, ref_logps, labels, world)
        loss.backward()
        grad_norm = nn.utils.clip_grad_norm_(model.parameters(), args.max_norm).full_tensor()
        optimizer.step()
        optimizer.zero_grad()

        mean = loss.detach().clone()
        for value in (mean, sums, counts):
            dist.all_reduce(value)
        if rank == 0 and (step % 5 == 0 or step == args.steps - 1):
            chosen, rejected = (sums / counts.clamp(min=1)).tolist()
            print(
                f"step {step:2d} loss {mean.item() / world:.6f} kl {kl.item():.5f} chosen_reward {chosen:.5f} "
                f"reject_reward {rejected:.5f} grad_norm {grad_norm.item():.5f}",
                flush=True,
            )

    weight = sum(p.full_tensor().double().abs().sum() for p in model.parameters()).item()
    if rank == 0:
        print(f"|w| {weight:.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
