"""LoRA tuning on instruction data. The frozen base is sharded; the adapters are replicated outside FSDP.

Only the adapters and their optimizers go into a checkpoint, the base is always rebuilt from its seed.
"""
import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

from model import BaseLM
from reduce import BucketReducer

VOCAB, MAXLEN = 36, 14


def instructions(step, batch):
    """Prompt tokens carry no loss; answers differ in length."""
    g = torch.Generator().manual_seed(600 + step)
    ids = torch.randint(0, VOCAB, (batch, MAXLEN), generator=g)
    prompt = torch.randint(2, 6, (batch, 1), generator=g)
    length = torch.randint(8, MAXLEN + 1, (batch, 1), generator=g)
    at = torch.arange(MAXLEN)
    first = ids.gather(1, prompt - 1)
    answer = (first + at - prompt + 1) % VOCAB
    ids = torch.where(at >= prompt, answer, ids)
    labels = torch.where((at >= prompt) & (at < length), ids, -100)
    return ids, labels


def wrap(model):
    adapters = set(model.adapters().values())
    for layer in model.layers:
        fully_shard(layer, ignored_params=adapters)
    fully_shard(model, ignored_params=adapters)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=14)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--micro", type=int, default=2)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="adapters")
    ap.add_argument("--resume")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(30)
    model = BaseLM(VOCAB)
    wrap(model)
    adapters = model.adapters()
    reducer = BucketReducer(adapters.values())
    # LoRA+: the B factors learn faster, with momentum SGD for A and Adam for B
    opt_a = torch.optim.SGD([p for n, p in adapters.items() if n.endswith("lora_a")], lr=0.1, momentum=0.9, nesterov=True)
    opt_b = torch.optim.Adam([p for n, p in adapters.items() if n.endswith("lora_b")], lr=1e-2)
    optimizers = {"a": opt_a, "b": opt_b}

    step = 0
    if args.resume:
        newest = max(Path(args.resume).glob("adapter_*.pt"), key=lambda f: int(f.stem.split("_")[1]))
        blob = torch.load(newest, weights_only=False)
        model.load_state_dict(blob["adapters"], strict=False)
        for k, opt in optimizers.items():
            opt.load_state_dict(blob[k])
        step = blob["step"]

    while step < args.steps:
        ids, labels = instructions(step, args.batch)
        mine = list(range(rank, args.batch, world))
        counts = torch.zeros(2)
        for part in range(args.micro):
            pick = mine[part::args.micro]
            logits = model(ids[pick])
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[pick, 1:].flatten(), reduction="sum")
            loss.backward()
            counts += torch.stack([(labels[pick, 1:] != -100).sum().float(), loss.detach()])
        tokens, total = reducer.add_up(counts)
        reducer.scale(1.0 / tokens.item())
        for opt in optimizers.values():
            opt.step()
            opt.zero_grad(set_to_none=False)
        step += 1
        if rank == 0:
            print(f"step {step} loss {total / tokens:.4f}", flush=True)
            if args.save_every and step % args.save_every == 0:
                Path(args.out).mkdir(parents=True, exist_ok=True)
                torch.save({"adapters": {n: p.detach() for n, p in adapters.items()}, "step": step,
                            **{k: o.state_dict() for k, o in optimizers.items()}}, Path(args.out) / f"adapter_{step}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
