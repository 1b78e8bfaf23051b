"""python finetune.py --model FOLDER --output FOLDER"""

import argparse

import torch
from modeling_tiny import TinyForCausalLM
from textdata import batch_of, sequences

parser = argparse.ArgumentParser()
parser.add_argument("--model", required=True)
parser.add_argument("--output")
parser.add_argument("--max_steps", type=int, default=20)
parser.add_argument("--train_batch_size", type=int, default=16)
parser.add_argument("--learning_rate", type=float, default=1e-3)


def collate(samples, indices):
    return {"input_ids": samples[indices], "labels": samples[indices]}


def main(args):
    model = TinyForCausalLM.from_pretrained(args.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=20)
    samples = sequences(192, seed=4)[0]
    model.train()
    for step in range(args.max_steps):
        batch = collate(samples, batch_of(step, args.train_batch_size, len(samples)))
        output = model(**batch)
        output.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        print({"step": step + 1, "loss": round(output.loss.item(), 4)}, flush=True)
    if args.output:
        model.save_pretrained(args.output)


if __name__ == "__main__":
    main(parser.parse_args())
