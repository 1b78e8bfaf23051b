"""Forward-Forward training: every layer is a sharding root of its own, with its own loss and optimizer."""
import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from glyphs import CLASSES, make_glyphs, with_label
from layers import FFNet


def layer_step(layer, opt, x_pos, x_neg):
    """Trains one layer and returns what the next layer gets to see, cut off from the graph."""
    h = layer(torch.cat([x_pos, x_neg]))
    h_pos, h_neg = h[:len(x_pos)], h[len(x_pos):]
    loss = layer.local_loss(h_pos, h_neg)
    loss.backward()
    opt.step()
    opt.zero_grad()
    layer.track(h_pos.detach())
    return h_pos.detach(), h_neg.detach(), loss.detach()


def accuracy(net, x, y, rank, world):
    x, y = x[rank::world], y[rank::world]
    scores = torch.stack([net.goodness(with_label(x, torch.full_like(y, c)), skip_first=True) for c in range(CLASSES)], 1)
    hits = torch.tensor([(scores.argmax(1) == y).sum().item(), len(y)], dtype=torch.float64)
    dist.all_reduce(hits)
    return (hits[0] / hits[1]).item()


def collect(net, opts, gen, step):
    state = {"gen": gen.get_state(), "step": step}
    for i, (layer, opt) in enumerate(zip(net, opts)):
        weights, moments = get_state_dict(layer, opt)
        state[f"layer{i}"] = {"weights": weights, "moments": moments}
    return state


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", type=Path, default=Path("ff"))
    ap.add_argument("--resume", type=Path)
    ap.add_argument("--export", type=Path)
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(30)
    net = FFNet([36 + CLASSES, 48, 48])
    for layer in net:
        fully_shard(layer)
    opts = [torch.optim.Adam(layer.parameters(), lr=0.02) for layer in net]

    x, y = make_glyphs()
    train_x, train_y, test_x, test_y = x[:256], y[:256], x[256:], y[256:]
    gen = torch.Generator().manual_seed(8)

    step = 0
    if args.resume:
        state = collect(net, opts, gen, 0)
        dcp.load(state, checkpoint_id=str(max(args.resume.glob("ff*"))))
        for i, (layer, opt) in enumerate(zip(net, opts)):
            part = state[f"layer{i}"]
            set_state_dict(layer, opt, model_state_dict=part["weights"], optim_state_dict=part["moments"])
        gen.set_state(state["gen"])
        step = state["step"]

    while step < args.steps:
        rows = torch.randint(len(train_x), (args.batch,), generator=gen)
        wrong = (train_y[rows] + torch.randint(1, CLASSES, (args.batch,), generator=gen)) % CLASSES
        mine = slice(rank * args.batch // world, (rank + 1) * args.batch // world)
        bx, by, bw = train_x[rows][mine], train_y[rows][mine], wrong[mine]
        pos, neg = with_label(bx, by), with_label(bx, bw)
        losses = []
        for layer, opt in zip(net, opts):
            pos, neg, loss = layer_step(layer, opt, pos, neg)
            losses.append(loss)
        losses = torch.stack(losses)
        dist.all_reduce(losses)
        step += 1
        if step % 6 == 0:
            acc = accuracy(net, test_x, test_y, rank, world)
            if rank == 0:
                print(f"step {step} layer losses {[round(v, 4) for v in (losses / world).tolist()]} test accuracy {acc:.3f}")
        if args.save_every and step % args.save_every == 0:
            dcp.save(collect(net, opts, gen, step), checkpoint_id=str(args.out / f"ff{step:05d}"))

    if args.export:
        full = [{k: v.full_tensor() if k.startswith("lin") else v for k, v in layer.state_dict().items()} for layer in net]
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
