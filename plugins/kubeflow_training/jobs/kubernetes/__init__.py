"""Jobs on a Kubernetes cluster with the Kubeflow training operator."""

from kubeflow_training.jobs.kubernetes.cluster import KubernetesCluster

__all__ = ["KubernetesCluster"]
