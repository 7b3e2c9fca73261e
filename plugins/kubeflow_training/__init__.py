"""Distributed training jobs for Airflow: operator, sensor, trigger and links for PyTorchJob."""
