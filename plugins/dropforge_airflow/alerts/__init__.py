"""What people are told, where they asked for it: a run failed, a word is needed, an alias moved, data were refused."""
