"""Fine-tuning of a dialogue model."""
