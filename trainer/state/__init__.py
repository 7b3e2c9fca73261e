"""What survives a process: checkpoints and signals."""
