"""torch.compile beside FSDP2."""
