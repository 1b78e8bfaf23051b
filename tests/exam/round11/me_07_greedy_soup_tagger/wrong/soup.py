"""Greedy model soup (Wortsman et al., 2022) over the snapshots of a cyclic schedule."""
import torch


class Soup:
    def __init__(self, model):
        self.model = model
        self.params = list(model.parameters())
        self.snapshots = []

    @torch.no_grad()
    def collect(self):
        self.snapshots.append([p.to_local().clone() for p in self.params])

    @torch.no_grad()
    def load(self, weights):
        for p, w in zip(self.params, weights):
            p.to_local().copy_(w)

    def average(self, indices):
        return [torch.stack([self.snapshots[i][k] for i in indices]).mean(0) for k in range(len(self.params))]

    def greedy(self, evaluate):
        """Loads the best soup into the model; returns its members and its validation loss."""
        single = []
        for i in range(len(self.snapshots)):
            self.load(self.snapshots[i])
            single.append(evaluate())
        order = sorted(range(len(single)), key=single.__getitem__)
        members, best = [order[0]], single[order[0]]
        for i in order[1:]:
            self.load(self.average(members + [i]))
            loss = evaluate()
            if loss <= best:
                members, best = members + [i], loss
        self.load(self.average(members))
        return members, best, single
