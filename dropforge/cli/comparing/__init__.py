"""The ways in which `dropforge compare` shows what differs."""
