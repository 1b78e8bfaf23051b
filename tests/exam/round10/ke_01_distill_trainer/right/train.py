import argparse

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

from config import DistillConfig
from data import InstructionBatches
from model import TinyLM
from trainer import Checkpointer, DistillTrainer, PrintLoss


def pretrain_teacher(teacher, cfg):
    """A short warm start of the teacher, the same on every rank."""
    full = InstructionBatches(cfg, 0, 1)
    opt = torch.optim.Adam(teacher.parameters(), lr=3e-3)
    for step in range(30):
        for ids, labels in full.step_batches(10_000 + step):
            loss = torch.nn.functional.cross_entropy(teacher(ids).flatten(0, 1), labels.flatten())
            loss.backward()
        opt.step()
        opt.zero_grad()
    teacher.requires_grad_(False)
    return teacher.eval()


def shard(model):
    for blk in model.blocks:
        fully_shard(blk)
    return fully_shard(model)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="")
    ap.add_argument("--resume", default="")
    ap.add_argument("--export", default="")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    cfg = DistillConfig()
    torch.manual_seed(cfg.seed)
    teacher = pretrain_teacher(TinyLM(cfg.vocab, cfg.teacher_dim, cfg.teacher_layers, cfg.max_len), cfg)
    student = TinyLM(cfg.vocab, cfg.student_dim, cfg.student_layers, cfg.max_len)
    teacher, student = shard(teacher), shard(student)

    data = InstructionBatches(cfg, dist.get_rank(), dist.get_world_size())
    callbacks = [PrintLoss()]
    if args.save_every:
        callbacks.append(Checkpointer(args.out, args.save_every))
    trainer = DistillTrainer(cfg, student, teacher, data, callbacks)
    if args.resume:
        trainer.resume(args.resume)
    trainer.fit()

    if args.export:
        weights = get_model_state_dict(student, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if dist.get_rank() == 0:
            torch.save(weights, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
