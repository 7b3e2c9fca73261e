"""Example DAGs, which the documentation quotes and the tests run; Airflow executes none of them by itself."""
