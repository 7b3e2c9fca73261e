"""The one file that Airflow's plugin manager executes (see `plugins/.airflowignore`)."""

from __future__ import annotations

from airflow.plugins_manager import AirflowPlugin


class DropforgePlugin(AirflowPlugin):
    """Makes Dropforge visible under Admin, Plugins; DAGs, assets and triggers are found without it."""

    name = "dropforge"
