import torch
import torch.distributed as dist
import torch.nn.functional as F


@torch.no_grad()
def embed(tower, chunks):
    return torch.cat([tower(c) for c in chunks])


def gather(local):
    parts = [torch.empty_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, local.contiguous())
    return torch.cat(parts)


def cached_step(image_tower, text_tower, temperature, images, texts, chunk):
    """InfoNCE over the global batch with activations of one chunk at a time.

    1. embed all chunks without a graph and gather them from all ranks;
    2. the loss of the whole batch, whose gradient with respect to every embedding each rank computes alike;
    3. embed the chunks again, with a graph, and push the cached gradient of this rank's rows through.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    image_chunks, text_chunks = images.split(chunk), texts.split(chunk)
    a = gather(embed(image_tower, image_chunks)).requires_grad_()
    b = gather(embed(text_tower, text_chunks)).requires_grad_()
    labels = torch.arange(len(a))
    logits = temperature(a @ b.T)
    loss = 0.5 * (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels))
    # the temperature sees the whole batch on each rank: the mean over ranks is already its gradient
    loss.backward()

    n = len(images)
    for tower, chunks, full in ((image_tower, image_chunks, a), (text_tower, text_chunks, b)):
        # a rank holds only its own rows of the gradient, FSDP takes the mean: hence the factor `world`
        cached = full.grad[rank * n : (rank + 1) * n] * world
        for i, (c, g) in enumerate(zip(chunks, cached.split(chunk))):
            tower.set_requires_gradient_sync(i == len(chunks) - 1)
            (tower(c) * g).sum().backward()
        tower.set_requires_gradient_sync(True)
    return loss.item()
