"""What people see: log lines, MLflow and the report."""
