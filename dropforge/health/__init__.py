"""What a machine's own words say about its GPUs, and what follows from them for a training. Pure."""
