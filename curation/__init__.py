"""A drop becomes a dataset version."""
