"""Fine-tunes a small text classifier on few noisy labels; keeps the weights of the best validation loss and reports these."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

VOCAB, LENGTH, CLASSES = 80, 20, 4


class TextCNN(nn.Module):
    def __init__(self, dim=24, channels=32):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.conv3 = nn.Conv1d(dim, channels, 3)
        self.conv5 = nn.Conv1d(dim, channels, 5)
        self.fc = nn.Linear(2 * channels, CLASSES)

    def forward(self, ids):
        x = self.embed(ids).transpose(1, 2)
        feats = [F.relu(conv(x)).mean(-1) for conv in (self.conv3, self.conv5)]
        return self.fc(torch.cat(feats, 1))


def texts(n, seed, label_noise):
    """Every class prefers its own 20 words; a share of the labels is wrong."""
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, CLASSES, (n,), generator=g)
    own = torch.rand(n, LENGTH, generator=g) < 0.25
    words = torch.randint(0, VOCAB, (n, LENGTH), generator=g)
    topic = y[:, None] * 20 + torch.randint(0, 20, (n, LENGTH), generator=g)
    ids = torch.where(own, topic, words)
    wrong = torch.rand(n, generator=g) < label_noise
    y = torch.where(wrong, torch.randint(0, CLASSES, (n,), generator=g), y)
    return ids, y


@torch.no_grad()
def evaluate(model, ids, y, rank, world):
    model.eval()
    logits = model(ids[rank::world])
    target = y[rank::world]
    sums = torch.stack([F.cross_entropy(logits, target, reduction="sum"), (logits.argmax(1) == target).sum().float(), torch.tensor(float(len(target)))])
    dist.all_reduce(sums)
    model.reshard()  # without a backward the whole weights would stay registered
    model.train()
    return (sums[0] / sums[2]).item(), (sums[1] / sums[2]).item()


class BestWeights:
    """Remembers the local shards of the best evaluation so far."""

    def __init__(self, model):
        self.model = model
        self.loss, self.step, self.shards = float("inf"), 0, {}

    def offer(self, loss, step):
        if loss < self.loss:
            self.loss, self.step = loss, step
            self.shards = {name: self.local(p).clone() for name, p in self.model.named_parameters()}

    @torch.no_grad()
    def restore(self):
        for name, p in self.model.named_parameters():
            self.local(p).copy_(self.shards[name])

    @staticmethod
    def local(p):
        return p.detach().to_local() if hasattr(p, "to_local") else p.detach()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=24)
    ap.add_argument("--eval-every", type=int, default=2)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--ckpt-dir", default=".")
    ap.add_argument("--resume", default="")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(13)
    train = texts(96, 1, label_noise=0.4)
    valid = texts(200, 2, label_noise=0.0)
    test = texts(400, 3, label_noise=0.0)

    model = TextCNN()
    fully_shard(model)
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    best = BestWeights(model)
    start = 0

    if args.resume:
        name = max((f for f in os.listdir(args.resume) if f.startswith("state_")), key=lambda f: int(f.split("_")[1]))
        state = torch.load(os.path.join(args.resume, name, f"{rank}.pt"), weights_only=False)
        with torch.no_grad():
            for n, p in model.named_parameters():
                p.copy_(state["model"][n])
        opt.load_state_dict(state["opt"])
        best.loss, best.step, best.shards = state["best"]
        start = state["step"]

    for step in range(start + 1, args.steps + 1):
        pick = torch.randperm(96, generator=torch.Generator().manual_seed(step))[:48].chunk(world)[rank]
        loss = F.cross_entropy(model(train[0][pick]), train[1][pick])
        opt.zero_grad()
        loss.backward()
        opt.step()

        if step % args.eval_every == 0:
            mean = loss.detach()
            dist.all_reduce(mean)
            valid_loss, valid_acc = evaluate(model, *valid, rank, world)
            best.offer(valid_loss, step)
            if rank == 0:
                print(f"step {step} train {mean.item() / world:.4f} valid {valid_loss:.4f} acc {valid_acc:.3f}", flush=True)

        if args.save_every and step % args.save_every == 0 and step < args.steps:
            folder = os.path.join(args.ckpt_dir, f"state_{step}")
            os.makedirs(folder, exist_ok=True)
            torch.save(
                {"model": dict(model.named_parameters()), "opt": opt.state_dict(), "best": (best.loss, best.step, best.shards), "step": step},
                os.path.join(folder, f"{rank}.pt"),
            )
            dist.barrier()

    best.restore()
    test_loss, test_acc = evaluate(model, *test, rank, world)
    if rank == 0:
        print(f"best step {best.step} (valid {best.loss:.4f}): test loss {test_loss:.4f} acc {test_acc:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
