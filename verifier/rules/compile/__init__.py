"""torch.compile beside FSDP2."""

ORDER = 30
