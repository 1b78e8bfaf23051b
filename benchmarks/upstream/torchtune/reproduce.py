"""The samples after a resume on another number of ranks, with the loader and the sampler that
recipes/full_finetune_distributed.py makes. One process, no GPU; torchdata 0.11.
"""

from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

SAMPLES = list(range(40))


def loader(ranks, rank, batch):
    sampler = StatefulDistributedSampler(
        SAMPLES, num_replicas=ranks, rank=rank, shuffle=True, seed=0
    )
    return StatefulDataLoader(SAMPLES, batch_size=batch, sampler=sampler, drop_last=True)


def following(iterators):
    return [sample for one in iterators for sample in next(one).tolist()]


loaders = [loader(2, rank, 2) for rank in range(2)]
iterators = [iter(one) for one in loaders]
seen = [following(iterators) for _ in range(2)]
state = loaders[0].state_dict()  # what rank 0 saves: samples of one rank
print("steps 1 and 2 on 2 ranks:", *seen)
print("step 3 without a resume: ", following(iterators))
again = loader(1, 0, 4)
again.load_state_dict(state)
print("step 3 resumed on 1 rank:", following([iter(again)]))
