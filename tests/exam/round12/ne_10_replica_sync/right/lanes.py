"""Gradient exchange between islands: one flat buffer per bucket, run once per optimizer step."""
import torch
import torch.distributed as dist


class LaneReducer:
    def __init__(self, model, topology, bucket_elems=2000):
        self.group, self.n = topology.lane_group, topology.islands
        self.buckets, size = [[]], 0
        for p in reversed(list(model.parameters())):
            if size >= bucket_elems:
                self.buckets.append([])
                size = 0
            self.buckets[-1].append(p)
            size += p.to_local().numel()

    @torch.no_grad()
    def align(self):
        """Every island starts from the weights of the first one."""
        if self.n > 1:
            src = dist.get_global_rank(self.group, 0)
            for bucket in self.buckets:
                for p in bucket:
                    dist.broadcast(p.detach().to_local(), src=src, group=self.group)

    @torch.no_grad()
    def reduce(self):
        if self.n == 1:
            return
        work = []
        for bucket in self.buckets:
            flat = torch.cat([p.grad.to_local().flatten() for p in bucket])
            work.append((bucket, flat, dist.all_reduce(flat, group=self.group, async_op=True)))
        for bucket, flat, handle in work:
            handle.wait()
            flat /= self.n
            at = 0
            for p in bucket:
                g = p.grad.to_local()
                g.copy_(flat[at:at + g.numel()].view_as(g))
                at += g.numel()
