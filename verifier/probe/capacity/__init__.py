"""Records a capacity run: memory by kind, collectives, FLOPs, what is read from tensors."""
