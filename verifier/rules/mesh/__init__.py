"""Device meshes, replicas and tensor parallelism."""

ORDER = 60
