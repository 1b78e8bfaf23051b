"""Which samples each rank trains on."""

ORDER = 90
