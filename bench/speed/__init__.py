"""Speed and memory of a training step, ours beside its peers. `python -m bench.speed`."""
