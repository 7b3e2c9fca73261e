"""Dropforge: drop data into S3, get back a fine-tuned, evaluated, registered model."""

__version__ = "0.1.0"
