"""Synthetic transaction graphs of very different sizes; only part of the nodes have a label."""
import torch


def make_graph(gen, weights):
    n = int(torch.randint(8, 60, (1,), generator=gen))
    big = n > 30
    x = torch.randn(n, weights.shape[0], generator=gen) + (0.5 if big else -0.5)
    adj = (torch.rand(n, n, generator=gen) < 4.0 / n).float()
    adj = ((adj + adj.T + torch.eye(n)) > 0).float()
    adj = adj / adj.sum(1, keepdim=True)
    y = ((adj @ x) @ weights + 0.3 * torch.randn(n, weights.shape[1], generator=gen)).argmax(1)
    labelled = torch.rand(n, generator=gen) < (0.7 if big else 0.25)
    labelled[0] = True
    return x, adj, y, labelled


class GraphSet:
    def __init__(self, count, seed, n_feats=12, n_classes=5):
        weights = torch.randn(n_feats, n_classes, generator=torch.Generator().manual_seed(0))
        gen = torch.Generator().manual_seed(seed)
        # sorted by size, so that graphs padded together are alike
        self.graphs = sorted((make_graph(gen, weights) for _ in range(count)), key=lambda g: len(g[0]))

    def __len__(self):
        return len(self.graphs)

    def collate(self, ids):
        picked = [self.graphs[i] for i in ids]
        size = max(len(g[0]) for g in picked)
        x = torch.zeros(len(picked), size, picked[0][0].shape[1])
        adj, y = torch.zeros(len(picked), size, size), torch.zeros(len(picked), size, dtype=torch.long)
        mask = torch.zeros(len(picked), size, dtype=torch.bool)
        for k, (gx, ga, gy, gm) in enumerate(picked):
            n = len(gx)
            x[k, :n], adj[k, :n, :n], y[k, :n], mask[k, :n] = gx, ga, gy, gm
        return x, adj, y, mask
