"""Semi-supervised text classification with a mean teacher."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_model_state_dict, set_state_dict

from teacher import MeanTeacher, build
from texts import CLASSES, VOCAB, mask_words, texts

CFG = dict(vocab=VOCAB, dim=32, depth=2, classes=CLASSES)


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=50)
    p.add_argument("--labelled", type=int, default=16)
    p.add_argument("--unlabelled", type=int, default=32)
    p.add_argument("--lr", type=float, default=3e-3)
    p.add_argument("--decay", type=float, default=0.985)
    p.add_argument("--consistency", type=float, default=1.0)
    p.add_argument("--save-to")
    p.add_argument("--save-every", type=int, default=15)
    p.add_argument("--resume")
    return p.parse_args()


def gather_state(student, optimizer, teacher, step):
    weights, optim = get_state_dict(student, optimizer)
    return {"student": weights, "optim": optim, "teacher": get_model_state_dict(teacher.net), "step": step}


def resume(folder, student, optimizer, teacher):
    newest = max((d for d in os.listdir(folder) if d.isdigit()), key=int)
    state = gather_state(student, optimizer, teacher, 0)
    dcp.load(state, checkpoint_id=os.path.join(folder, newest))
    set_state_dict(student, optimizer, model_state_dict=state["student"], optim_state_dict=state["optim"])
    set_model_state_dict(teacher.net, state["teacher"])
    return state["step"]


def accuracy(net, rank, world):
    ids, labels = texts(999_999, 256)
    with torch.no_grad():
        right = (net(ids[rank::world]).argmax(-1) == labels[rank::world]).sum()
    dist.all_reduce(right)
    return right.item() / len(labels)


def main():
    args = parse()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    student = build(CFG, seed=21)
    teacher = MeanTeacher(CFG, seed=21, decay=args.decay)
    optimizer = torch.optim.AdamW(student.parameters(), lr=args.lr, weight_decay=0.02, eps=1e-6)
    start = resume(args.resume, student, optimizer, teacher) if args.resume else 0

    for step in range(start, args.steps):
        ids, labels = texts(step % 6, args.labelled)
        raw, _ = texts(5_000 + step, args.unlabelled)
        strong, weak = mask_words(raw, 2 * step, 0.35), mask_words(raw, 2 * step + 1, 0.1)
        ids, labels, strong, weak = (t[rank::world] for t in (ids, labels, strong, weak))

        target = teacher(weak).softmax(-1)
        logits = student(torch.cat([ids, strong]))
        supervised = F.cross_entropy(logits[:len(ids)], labels)
        consistency = F.mse_loss(logits[len(ids):].softmax(-1), target)
        ramp = min(1.0, (step + 1) / 15)
        loss = supervised + args.consistency * ramp * consistency
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        teacher.update(student)

        shown = torch.stack([supervised.detach(), consistency.detach()]) / world
        dist.all_reduce(shown)
        if rank == 0:
            print(f"step {step + 1:2d} supervised {shown[0]:.4f} consistency {shown[1]:.5f}")
        if args.save_to and (step + 1) % args.save_every == 0:
            dcp.save(gather_state(student, optimizer, teacher, step + 1),
                     checkpoint_id=os.path.join(args.save_to, str(step + 1)))

    student.eval()
    acc_student, acc_teacher = accuracy(student, rank, world), accuracy(teacher, rank, world)
    if rank == 0:
        print(f"accuracy: student {acc_student:.4f} teacher {acc_teacher:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
