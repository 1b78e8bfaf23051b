"""Pre-training in one process: python train.py --steps 100"""

import argparse

import torch
import torch.nn.functional as F
from llama import Llama, init_weights
from textdata import batch_of, sequences


def build(seed):
    model = Llama()
    init_weights(model, seed)
    return model


def train(model, steps, batch):
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
    inputs, targets = sequences(256)
    for step in range(steps):
        chosen = batch_of(step, batch, len(inputs))
        loss = F.cross_entropy(model(inputs[chosen]).flatten(0, 1), targets[chosen].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        print(f"step {step + 1} loss {loss.item():.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    train(build(args.seed), args.steps, args.batch)
