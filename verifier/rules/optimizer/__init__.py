"""Which tensors the optimizer holds and what it does with them."""
