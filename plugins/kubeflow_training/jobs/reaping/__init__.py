"""Live jobs that nobody waits for any more: which they are, and their removal."""
