import random

import torch
import torch.distributed as dist


class Population:
    """Members train in lock step on the whole world; the weakest copies the fittest after every round."""

    def __init__(self, members, task, seed):
        self.members, self.task, self.seed = members, task, seed
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def local(self, pair):
        return (t.chunk(self.world)[self.rank] for t in pair)

    def mean(self, value):
        value = value.detach().clone()
        dist.all_reduce(value)
        return value.item() / self.world

    def train(self, step):
        x, y = self.local(self.task.batch(step))
        losses = []
        for m in self.members:
            loss = (m.model(x) - y).square().mean()
            loss.backward()
            m.optim.step()
            m.optim.zero_grad()
            losses.append(self.mean(loss))
        return losses

    @torch.no_grad()
    def rank_members(self):
        x, y = self.local(self.task.validation())
        for m in self.members:
            m.fitness = self.mean((m.model(x) - y).square().mean())
            m.model.reshard()
        return sorted(self.members, key=lambda m: m.fitness)

    def evolve(self, round_index):
        order = self.rank_members()
        best, worst = order[0], order[-1]
        worst.inherit(best)
        dice = random.Random(self.seed * 1000 + round_index)
        worst.lr = best.lr * dice.choice([0.6, 0.8, 1.25, 1.6])
        return best, worst
