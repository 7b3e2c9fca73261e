"""Before a run fetches anything: whether nodes are whole, all ranks are there, and how fast they reach each other."""
