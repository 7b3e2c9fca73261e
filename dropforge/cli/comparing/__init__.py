"""What `dropforge compare` is made of: finding runs and reading them, and the ways to show what differs."""
