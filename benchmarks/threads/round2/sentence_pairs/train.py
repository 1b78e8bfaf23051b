"""Sentence-embedding training with a cosine-similarity loss module around the encoder."""
import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

VOCAB, LENGTH, TOPICS = 60, 8, 6


class EncoderLayer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.mix = nn.Linear(LENGTH, LENGTH)
        self.fc1, self.fc2 = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x):
        x = x + self.mix(self.norm(x).transpose(1, 2)).transpose(1, 2)
        return x + self.fc2(F.gelu(self.fc1(x)))


class SentenceEncoder(nn.Module):
    def __init__(self, dim=24, layers=2):
        super().__init__()
        self.words = nn.Embedding(VOCAB, dim)
        self.layers = nn.ModuleList(EncoderLayer(dim) for _ in range(layers))
        self.dense = nn.Linear(dim, dim)

    def forward(self, tokens):
        x = self.words(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.normalize(self.dense(x.mean(1)), dim=-1)


class CosineSimilarityLoss(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, first, second, score):
        a, b = self.model(torch.cat([first, second])).chunk(2)
        return F.mse_loss((a * b).sum(-1), score)


def sentence_pairs(n, seed):
    """Sentences are words of one topic; pairs of the same topic have score 1, others 0."""
    gen = torch.Generator().manual_seed(seed)
    topic = torch.randint(TOPICS, (2, n), generator=gen)
    same = torch.rand(n, generator=gen) < 0.5
    topic[1] = torch.where(same, topic[0], topic[1])
    words = topic[..., None] * (VOCAB // TOPICS) + torch.randint(
        VOCAB // TOPICS, (2, n, LENGTH), generator=gen)
    stray = torch.rand(2, n, LENGTH, generator=gen) < 0.2
    words = torch.where(stray, torch.randint(VOCAB, (2, n, LENGTH), generator=gen), words)
    return words[0], words[1], (topic[0] == topic[1]).float()


class Trainer:
    def __init__(self, args, device):
        self.args, self.device = args, device
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.model = self.build_model(args.seed)
        self.loss = CosineSimilarityLoss(self.model)
        self.optimizer = None

    def build_model(self, seed):
        torch.manual_seed(seed)
        model = SentenceEncoder().to(self.device)
        for layer in model.layers:
            fully_shard(layer)
        return fully_shard(model, reshard_after_forward=True)

    def batch(self, n, seed):
        return [x[self.rank::self.world].to(self.device) for x in sentence_pairs(n, seed)]

    def save_checkpoint(self, step):
        folder = Path(self.args.output_dir)
        dcp.save(get_model_state_dict(self.model), checkpoint_id=folder / "model")
        dcp.save({"optimizer": get_optimizer_state_dict(self.loss, self.optimizer), "step": step},
                 checkpoint_id=folder / "trainer")

    def load_from_checkpoint(self):
        """The encoder as it was saved (its settings could differ from the present ones)."""
        model = self.build_model(self.args.seed)
        state = get_model_state_dict(model)
        dcp.load(state, checkpoint_id=Path(self.args.output_dir) / "model")
        set_model_state_dict(model, state)
        self.model = model
        self.loss.model = model

    def load_optimizer(self):
        state = {"optimizer": get_optimizer_state_dict(self.loss, self.optimizer), "step": 0}
        dcp.load(state, checkpoint_id=Path(self.args.output_dir) / "trainer")
        set_optimizer_state_dict(self.loss, self.optimizer, state["optimizer"])
        return state["step"]

    def train(self):
        args, first = self.args, 0
        if args.resume_from_checkpoint:
            self.load_from_checkpoint()
        # losses may have weights of their own
        self.optimizer = torch.optim.AdamW(self.loss.parameters(), lr=args.lr)
        if args.resume_from_checkpoint:
            first = self.load_optimizer()
        for step in range(first, args.max_steps):
            loss = self.loss(*self.batch(args.batch_size, 300 + step))
            loss.backward()
            nn.utils.clip_grad_norm_(self.loss.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            shown = loss.detach().clone()
            dist.all_reduce(shown)
            if self.rank == 0 and (step + 1) % 5 == 0:
                print(f"step {step + 1:3d}  loss {shown.item() / self.world:.6f}", flush=True)
            if args.save_step == step + 1:
                self.save_checkpoint(step + 1)

    @torch.no_grad()
    def evaluate(self):
        first, second, score = self.batch(128, 5)
        sim = (self.model(first) * self.model(second)).sum(-1)
        right = ((sim > 0.5) == (score > 0.5)).sum().float()
        stats = torch.stack([right, F.mse_loss(sim, score, reduction="sum")])
        dist.all_reduce(stats)
        return (stats / 128).tolist()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--max-steps", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--seed", type=int, default=12)
    parser.add_argument("--output-dir", default=None)
    parser.add_argument("--save-step", type=int, default=0)
    parser.add_argument("--resume-from-checkpoint", action="store_true")
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    trainer = Trainer(args, device)
    trainer.train()
    accuracy, mse = trainer.evaluate()
    if trainer.rank == 0:
        print(f"evaluation: accuracy {accuracy:.4f}  mse {mse:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
