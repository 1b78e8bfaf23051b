import torch


def schedule(critic_iters):
    """Coroutine: yields which player moves; the caller sends back the critic's gap.

    The critic gets another move as long as its gap is negative."""
    while True:
        for _ in range(critic_iters):
            gap = yield "critic"
        extra = 0
        while gap < 0 and extra < 2:
            gap = yield "critic"
            extra += 1
        yield "gen"


@torch.no_grad()
def clip_weights(module, c):
    for p in module.parameters():
        p.to_local().clamp_(-c, c)


def batch_source(data, batch, rank, world, z_dim):
    def fetch(move):
        g = torch.Generator().manual_seed(move)
        x = data[torch.randint(0, len(data), (batch,), generator=g)]
        z = torch.randn(batch, z_dim, generator=g)
        return x.chunk(world)[rank], z.chunk(world)[rank]

    return fetch
