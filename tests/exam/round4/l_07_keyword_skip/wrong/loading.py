from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def make_loader(x, y, batch, rank, world, seed=0):
    ds = TensorDataset(x, y)
    sampler = DistributedSampler(ds, world, rank, shuffle=True, seed=seed, drop_last=True)
    return DataLoader(ds, batch_size=batch // world, sampler=sampler, drop_last=True), sampler
