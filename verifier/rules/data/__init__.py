"""Which samples each rank trains on."""
