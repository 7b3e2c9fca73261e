"""Triggers of Dropforge."""
