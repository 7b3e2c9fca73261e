"""Manifest, checks, observation and backends of a training job; needs no Airflow."""
