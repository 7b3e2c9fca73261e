"""The embedded stack: S3, SQS, MLflow, Airflow and the local cluster as processes of this machine."""
