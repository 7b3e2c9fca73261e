"""A dataset version becomes checkpoints, metrics and a model; runs on every rank."""
