"""A masked autoencoder."""
