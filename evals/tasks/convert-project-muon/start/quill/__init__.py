"""A language model that is trained by Muon."""
