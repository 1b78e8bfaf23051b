"""A diffusion model of drawn curves, over a mesh of data and tensor parallelism."""
