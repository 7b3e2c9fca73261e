"""What only Airflow knows: which Airflow this is, and the states of its tasks."""
