from contextlib import contextmanager


@contextmanager
def averaged_weights(model, optim):
    """Evaluation and nothing else happens at the averaged point."""
    model.eval()
    optim.eval()
    model.reshard()
    try:
        yield model
    finally:
        model.reshard()
        optim.train()
        model.train()
