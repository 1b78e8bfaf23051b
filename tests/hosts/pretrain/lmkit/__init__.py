"""A small pretraining kit: a Llama-like decoder, FSDP2 or HSDP, token-normalised losses, resumable at any number of ranks."""
