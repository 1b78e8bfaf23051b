"""Device meshes, replicas and tensor parallelism."""
