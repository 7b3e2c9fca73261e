"""What Prometheus and Grafana are told of drops, runs and trainings: derived from what is stored, never counted.

The ledger and the runs' folders in S3, MLflow and Airflow are the truth. A process that counted would forget with each
restart, and several would count twice; whoever derives is right after a restart, and so is a second one beside it.
"""
