"""What one GPU does in a few minutes: speed, memory and checkpoints. `python -m bench.gpu`."""
