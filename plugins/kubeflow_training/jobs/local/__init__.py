"""A cluster of one machine: the same PyTorchJob manifests, run as processes by a supervisor of their own."""

from kubeflow_training.jobs.local.cluster import LocalCluster

__all__ = ["LocalCluster"]
