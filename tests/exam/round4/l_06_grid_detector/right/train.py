"""Single-stage grid detector on synthetic rectangles (FSDP2)."""
import argparse

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

from data import batches, scenes
from losses import detection_loss
from net import Detector


@torch.no_grad()
def evaluate(model, img, obj, box, rank, world):
    logit, pred = model(img[rank::world])
    o, b = obj[rank::world], box[rank::world]
    hit = (logit > 0).float() * o
    err = ((pred - b).abs().mean(-1) * o).sum()
    stat = torch.stack([hit.sum(), (logit > 0).sum().float(), o.sum(), err])
    dist.all_reduce(stat)
    tp, said, true, err = stat.tolist()
    return tp / max(said, 1), tp / true, err / true


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=36)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--lr", type=float, default=4e-3)
    ap.add_argument("--export")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(12)
    model = Detector()
    for layer in model.backbone:
        fully_shard(layer)
    fully_shard(model)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=1e-2)

    img, obj, box = scenes(160, 5)
    val = scenes(48, 6)
    for step, ids in enumerate(batches(len(img), args.batch, args.steps, rank, world), 1):
        logit, pred = model(img[ids])
        loss, cls, l1 = detection_loss(logit, pred, obj[ids], box[ids])
        opt.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 3.0)
        opt.step()
        if step % 6 == 0:
            shown = torch.stack([loss.detach(), cls, l1]) / world
            dist.all_reduce(shown)
            if rank == 0:
                print("step {:3d} loss {:.4f} cls {:.4f} box {:.4f}".format(step, *shown.tolist()), flush=True)

    prec, rec, err = evaluate(model, *val, rank, world)
    if rank == 0:
        print(f"val precision {prec:.3f} recall {rec:.3f} box error {err:.3f}")
    if args.export:
        sd = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(sd, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
