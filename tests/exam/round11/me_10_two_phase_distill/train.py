"""Phase 1 trains a teacher, phase 2 distils it into a smaller student. Hybrid sharding:
gradients of the micro-batches are reduce-scattered at once, but all-reduced over the
replicas only with the last one."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lookahead import Lookahead
from nets import ResMLP, make_rings

ACCUM, MICRO = 3, 24


def build(seed, mesh, **kw):
    torch.manual_seed(seed)
    net = ResMLP(**kw)
    for m in net.mid:
        fully_shard(m, mesh=mesh)
    return fully_shard(net, mesh=mesh)


class Pipeline:
    def __init__(self, args):
        self.args = args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        replicas = 2 if self.world > 1 else 1
        mesh = init_device_mesh("cpu", (replicas, self.world // replicas), mesh_dim_names=("dp", "fsdp"))
        self.teacher = build(1, mesh)
        self.student = build(2, mesh, width=20, depth=2)
        self.teacher_opt = torch.optim.NAdam(self.teacher.parameters(), lr=4e-3, eps=1e-6)
        self.student_opt = Lookahead(torch.optim.AdamW(self.student.parameters(), lr=8e-3, eps=1e-6))
        self.gen = torch.Generator().manual_seed(3)
        self.step = 0

    def micro_batches(self):
        for i in range(ACCUM):
            x, y = make_rings(MICRO, self.gen)
            yield i == ACCUM - 1, x.chunk(self.world)[self.rank], y.chunk(self.world)[self.rank]

    def teacher_loss(self, x, y):
        return F.cross_entropy(self.teacher(x), y)

    def student_loss(self, x, y):
        with torch.no_grad():
            soft = F.softmax(self.teacher(x) / 2, dim=1)
        out = self.student(x)
        return 0.3 * F.cross_entropy(out, y) + 0.7 * 4 * F.kl_div(F.log_softmax(out / 2, dim=1), soft, reduction="batchmean")

    def train_step(self, model, opt, loss_fn):
        total = torch.zeros(())
        for last, x, y in self.micro_batches():
            model.set_requires_all_reduce(last)
            loss = loss_fn(x, y) / ACCUM
            loss.backward()
            total += loss.detach()
        opt.step()
        opt.zero_grad()
        dist.all_reduce(total)
        return total.item() / self.world

    def run(self):
        phases = [
            ("teacher", self.args.teacher_steps, self.teacher, self.teacher_opt, self.teacher_loss),
            ("student", self.args.student_steps, self.student, self.student_opt, self.student_loss),
        ]
        end = 0
        for name, steps, model, opt, loss_fn in phases:
            end += steps
            while self.step < end:
                loss = self.train_step(model, opt, loss_fn)
                self.step += 1
                if self.rank == 0 and self.step % 6 == 0:
                    print(f"{name} step {self.step} loss {loss:.4f}", flush=True)
                if self.args.out and self.step % self.args.save_every == 0:
                    self.save()

    def file(self, folder, step):
        return os.path.join(folder, str(step), f"{self.rank}.pt")

    def save(self):
        os.makedirs(os.path.join(self.args.out, str(self.step)), exist_ok=True)
        state = {
            "nets": [[p.to_local() for p in net.state_dict().values()] for net in (self.teacher, self.student)],
            "teacher_opt": self.teacher_opt.state_dict(),
            "student_opt": self.student_opt.state_dict(),
            "gen": self.gen.get_state(),
        }
        torch.save(state, self.file(self.args.out, self.step))
        dist.barrier()

    @torch.no_grad()
    def load(self, folder):
        self.step = max(int(name) for name in os.listdir(folder) if name.isdigit())
        state = torch.load(self.file(folder, self.step), weights_only=False)
        for net, shards in zip((self.teacher, self.student), state["nets"]):
            for p, shard in zip(net.state_dict().values(), shards):
                p.to_local().copy_(shard)
        self.teacher_opt.load_state_dict(state["teacher_opt"])
        self.student_opt.load_state_dict(state["student_opt"])
        self.gen.set_state(state["gen"])


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--teacher-steps", type=int, default=24)
    ap.add_argument("--student-steps", type=int, default=24)
    ap.add_argument("--out")
    ap.add_argument("--save-every", type=int, default=16)
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    pipeline = Pipeline(args)
    if args.resume:
        pipeline.load(args.resume)
    pipeline.run()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
