import torch.nn.functional as F


def run_epoch(model, opt, batches, accum):
    """One optimizer step per `accum` micro-batches, and one for what is left at the end of the epoch.

    Gradients are reduced once per window, with its last micro-batch."""
    losses, window = [], 0.0
    for i, (x, y) in enumerate(batches):
        first = i - i % accum
        size = min(accum, len(batches) - first)
        boundary = i + 1 == first + size
        model.set_requires_gradient_sync(boundary)
        loss = F.smooth_l1_loss(model(x), y) / size
        loss.backward()
        window += loss.item()
        if boundary:
            opt.step()
            opt.zero_grad()
            losses.append(window)
            window = 0.0
    return losses
