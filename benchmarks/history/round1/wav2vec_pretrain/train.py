"""Self-supervised pretraining of a speech encoder (wav2vec 2.0 style) with FSDP2.

A convolutional frontend turns the waveform into frames, a share of the frames is
masked, and the transformer has to pick the quantized frame of each masked
position out of a set of distractors of the same utterance.
"""
import argparse
import math
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

NUM_SAMPLES, STRIDE = 256, 8
NUM_FRAMES = NUM_SAMPLES // STRIDE
MASK_SPAN, NUM_SPANS, NUM_DISTRACTORS = 4, 3, 8


@dataclass
class SpeechBatch:
    waves: torch.Tensor  # (N, T)
    masked: torch.Tensor  # (N, S_msk), positions of the masked frames
    distractors: torch.Tensor  # (N, S_msk, L), indices into the masked frames

    def num_elements(self):
        return self.waves.numel()


@dataclass
class Output:
    logits: torch.Tensor  # (N, S_msk, L + 1)
    contrastive: torch.Tensor
    diversity: torch.Tensor
    penalty: torch.Tensor

    @property
    def loss(self):
        return self.contrastive + 0.1 * self.diversity + 10.0 * self.penalty


class SpeechDataset:
    """Sums of a few chirps per utterance, plus noise."""

    def __init__(self, size, seed):
        g = torch.Generator().manual_seed(seed)
        t = torch.linspace(0, 1, NUM_SAMPLES)
        freq = torch.randint(2, 30, (size, 3, 1), generator=g).float()
        sweep = torch.randint(-8, 9, (size, 3, 1), generator=g).float()
        phase = torch.rand(size, 3, 1, generator=g)
        waves = torch.sin(2 * math.pi * (freq * t + sweep * t * t + phase)).sum(1)
        self.waves = waves + 0.05 * torch.randn(size, NUM_SAMPLES, generator=g)

    def batch(self, indices, seed):
        masked, distractors = [], []
        for i in indices.tolist():
            g = torch.Generator().manual_seed(seed * 100003 + i)
            starts = torch.randperm(NUM_FRAMES // MASK_SPAN, generator=g)[:NUM_SPANS] * MASK_SPAN
            pos = (starts[:, None] + torch.arange(MASK_SPAN)).flatten().sort().values
            m = len(pos)
            others = torch.randint(0, m - 1, (m, NUM_DISTRACTORS), generator=g)
            others += others >= torch.arange(m)[:, None]
            masked.append(pos)
            distractors.append(others)
        return SpeechBatch(self.waves[indices], torch.stack(masked), torch.stack(distractors))


class ConvFrontend(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.conv1 = nn.Conv1d(1, dim, 8, stride=4, padding=2)
        self.conv2 = nn.Conv1d(dim, dim, 4, stride=2, padding=1)
        self.norm = nn.LayerNorm(dim)

    def forward(self, waves):
        x = F.gelu(self.conv1(waves.unsqueeze(1)))
        return F.gelu(self.conv2(x)).transpose(1, 2)


class Quantizer(nn.Module):
    def __init__(self, dim, groups=2, entries=8):
        super().__init__()
        self.groups, self.entries = groups, entries
        self.proj = nn.Linear(dim, groups * entries)
        self.codebook = nn.Parameter(torch.randn(groups, entries, dim // groups))

    def forward(self, x):
        n, s, _ = x.shape
        probs = self.proj(x).view(n, s, self.groups, self.entries).softmax(-1)
        codes = torch.einsum("nsge,ged->nsgd", probs, self.codebook)  # soft assignment
        avg = probs.mean(1)  # average use of the entries in an utterance
        perplexity = torch.exp(-(avg * (avg + 1e-7).log()).sum(-1)).sum(-1)
        diversity = (1 - perplexity / (self.groups * self.entries)).sum() * s
        return codes.flatten(2), diversity


class EncoderLayer(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.attn_norm = nn.LayerNorm(dim)
        self.attn = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.ffn_norm = nn.LayerNorm(dim)
        self.ffn = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        h = self.attn_norm(x)
        x = x + self.attn(h, h, h, need_weights=False)[0]
        return x + self.ffn(self.ffn_norm(x))


class Wav2Vec(nn.Module):
    def __init__(self, dim=32, layers=2, temperature=0.1):
        super().__init__()
        self.temperature = temperature
        self.frontend = ConvFrontend(dim)
        self.mask_embed = nn.Parameter(torch.rand(dim))
        self.pos = nn.Parameter(0.1 * torch.randn(NUM_FRAMES, dim))
        self.layers = nn.ModuleList(EncoderLayer(dim, 4) for _ in range(layers))
        self.final_proj = nn.Linear(dim, dim)
        self.quantizer = Quantizer(dim)
        self.target_proj = nn.Linear(dim, dim)

    def forward(self, batch):
        feats = self.frontend(batch.waves)
        rows = torch.arange(len(feats), device=feats.device)[:, None]
        penalty = feats.float().pow(2).mean(dim=(1, 2)).sum() * batch.masked.shape[1]
        feats = self.frontend.norm(feats)
        codes, diversity = self.quantizer(feats[rows, batch.masked])
        targets = self.target_proj(codes)

        x = feats.clone()
        x[rows, batch.masked] = self.mask_embed
        x = x + self.pos
        for layer in self.layers:
            x = layer(x)
        x = self.final_proj(x[rows, batch.masked])

        negatives = targets[rows[:, :, None], batch.distractors]
        candidates = torch.cat([targets.unsqueeze(2), negatives], dim=2)
        logits = F.cosine_similarity(x.unsqueeze(2), candidates, dim=-1) / self.temperature
        flat = logits.flatten(0, 1)
        contrastive = F.cross_entropy(flat, torch.zeros(len(flat), dtype=torch.long, device=flat.device), reduction="sum")
        return Output(logits, contrastive, diversity, penalty)


class MetricBag:
    """Sums over the micro batches and ranks of one step; losses are in bits."""

    def __init__(self, device):
        self.sums = torch.zeros(5, device=device)

    @torch.no_grad()
    def update(self, out, num_targets):
        hits = (out.logits.argmax(-1) == 0).float().mean() * num_targets
        losses = torch.stack([out.loss, out.contrastive, out.diversity]) / math.log(2)
        self.sums += torch.cat([losses, torch.stack([hits, hits.new_tensor(num_targets)])])

    def compute(self):
        dist.all_reduce(self.sums)
        loss, contrastive, diversity, hits = (self.sums[:4] / self.sums[4]).tolist()
        self.sums.zero_()
        return {"loss": loss, "contrastive": contrastive, "diversity": diversity, "accuracy": hits}


class PretrainUnit:
    def __init__(self, model, device):
        self.model = model
        self.metrics = MetricBag(device)

    def __call__(self, batch):
        out = self.model(batch)
        batch_size, seq_len = out.logits.shape[:2]
        num_targets = batch_size * seq_len
        self.metrics.update(out, num_targets)
        return out.loss, num_targets


def normalize_gradients(model, num_targets, device):
    """Turn gradients of summed losses (averaged over ranks) into a mean over all targets."""
    total = torch.tensor(float(num_targets), device=device)
    dist.all_reduce(total)
    for p in model.parameters():
        if p.grad is not None:
            p.grad.mul_(dist.get_world_size() / total.item())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=16, help="utterances per step, over all ranks")
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--max-grad-norm", type=float, default=0.5)
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    model = Wav2Vec().to(device)
    mesh = init_device_mesh(device.type, (world,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.01)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / 8))

    dataset = SpeechDataset(256, seed=7)
    unit = PretrainUnit(model, device)
    for step in range(1, args.steps + 1):
        g = torch.Generator().manual_seed(step)
        indices = torch.randperm(len(dataset.waves), generator=g)[: args.batch_size]
        num_targets = 0
        for micro in indices.chunk(args.accumulate):
            batch = dataset.batch(micro.chunk(world)[rank], seed=step)
            batch = SpeechBatch(batch.waves.to(device), batch.masked.to(device), batch.distractors.to(device))
            loss, n = unit(batch)
            loss.backward()
            num_targets += n
        normalize_gradients(model, num_targets, device)
        grad_norm = nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm).full_tensor()
        optimizer.step()
        warmup.step()
        optimizer.zero_grad()
        values = unit.metrics.compute()
        if rank == 0 and (step % 5 == 0 or step == 1):
            line = " ".join(f"{k} {v:.5f}" for k, v in values.items())
            print(f"step {step:3d} {line} grad_norm {grad_norm.item():.5f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
