"""Records a rehearsal: memory by kind, collectives, FLOPs, what is read from tensors."""
