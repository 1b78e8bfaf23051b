import torch


class SeedNodeLoader:
    """Gives each rank its part of the training nodes, once per epoch, in batches of equal size."""

    def __init__(self, nodes, batch_size, rank, world, seed=0):
        g = torch.Generator().manual_seed(seed)
        shuffled = nodes[torch.randperm(len(nodes), generator=g)]
        self.mine = shuffled[rank::world]
        self.batch = batch_size // world
        self.position = 0

    def __iter__(self):
        return self

    def __next__(self):
        ids = self.mine[self.position:self.position + self.batch]
        self.position = (self.position + self.batch) % len(self.mine)
        return ids

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]
