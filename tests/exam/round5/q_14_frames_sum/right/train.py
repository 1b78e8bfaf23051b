"""Frame-wise phone recognition. Gradients are SUMMED over ranks; the loss is divided by the global number of frames."""
import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule, fully_shard

from balance import BalancedBatches
from model import PhoneNet
from speech import collate, utterances


def shard_for_sums(model):
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    for m in model.modules():
        if isinstance(m, FSDPModule):
            m.set_gradient_divide_factor(1.0)
            m.set_force_sum_reduction_for_comms(True)
    return model


def run(args):
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = shard_for_sums(PhoneNet())
    opt = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-5)
    batches = BalancedBatches(utterances(120, seed=3), args.batch, rank, world, args.steps)
    for step, (items, frames) in enumerate(batches, 1):
        x, lab = collate(items)
        loss = F.cross_entropy(model(x).flatten(0, 1), lab.flatten(), ignore_index=-100, reduction="sum") / frames
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        opt.step()
        opt.zero_grad(set_to_none=True)
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0 and step % 5 == 0:
            print(f"step {step} loss/frame {shown.item():.4f} ({frames} frames, {len(items)} utterances here)", flush=True)

    res = torch.zeros(2)
    test = utterances(40, seed=4)
    x, lab = collate(test[rank::world])
    with torch.no_grad():
        ok = model(x).argmax(-1) == lab
    res += torch.stack([ok.sum().float(), (lab != -100).sum().float()])
    dist.all_reduce(res)
    if rank == 0:
        print(f"test frame accuracy {(res[0] / res[1]).item():.3f}")
    if args.export:
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, args.export)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--batch", type=int, default=9)
    ap.add_argument("--lr", type=float, default=5e-3)
    ap.add_argument("--clip", type=float, default=1.0)
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    try:
        run(args)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
