"""Where a gang runs: which instances there are, and what a pod on one of them may ask for. Pure."""
