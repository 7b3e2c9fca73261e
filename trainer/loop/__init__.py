"""The training loop and what it decides by: steps, rates, counters, intervals, ends."""
