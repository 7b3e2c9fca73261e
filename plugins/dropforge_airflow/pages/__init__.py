"""Dropforge's pages inside Airflow: the tab on a task and on a run, and the page of the families.

`plugin.py` names them; only the API server imports this package, when its first page is asked for. `routes` say who may
see what, `look` gathers with bounds, each reader (`task`, `gang`, `course`, `folder`, `ledgers`, `versions`) knows one
place, and `shown` and `family` make plain values of it. The browser's part is in `static/`.
"""
