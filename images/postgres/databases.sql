-- One role and one database for each of Airflow and MLflow. It may run any number of times: what is there stays, and a
-- password is the one of now.
\set ON_ERROR_STOP on
-- A statement that fails is not repeated in any log: passwords stand in some.
\set VERBOSITY terse
SET log_min_error_statement = panic;
\getenv airflow_password AIRFLOW_DB_PASSWORD
\getenv mlflow_password MLFLOW_DB_PASSWORD
SELECT format('CREATE ROLE %I LOGIN', name) FROM unnest(ARRAY['airflow', 'mlflow']) AS name
  WHERE NOT EXISTS (SELECT FROM pg_roles WHERE rolname = name) \gexec
ALTER ROLE airflow PASSWORD :'airflow_password';
ALTER ROLE mlflow PASSWORD :'mlflow_password';
SELECT format('CREATE DATABASE %I OWNER %I', name, name) FROM unnest(ARRAY['airflow', 'mlflow']) AS name
  WHERE NOT EXISTS (SELECT FROM pg_database WHERE datname = name) \gexec
-- Nobody but its owner gets into a database.
REVOKE CONNECT ON DATABASE airflow, mlflow FROM PUBLIC;
