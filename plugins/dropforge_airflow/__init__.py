"""The parts of Airflow that are Dropforge's own."""
