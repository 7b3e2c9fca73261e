"""A task and its gangs: which one is its own, what it remembers of them, and what it tells of their end."""
