"""A DAG's edges as people look at them."""

from __future__ import annotations

from airflow.sdk import DAG


def draw_chain(dag: DAG) -> None:
    """Take out edges that others imply: arguments of early tasks draw one to each task that reads them.

    Tasks run in the same order as before. A teardown keeps its edge to its setup, which has a meaning of its own.
    """
    before: dict[str, set[str]] = {}

    def ancestors(name: str) -> set[str]:
        if name not in before:
            above = dag.task_dict[name].upstream_task_ids
            before[name] = set(above).union(*(ancestors(one) for one in above))
        return before[name]

    for name, task in dag.task_dict.items():
        if task.is_teardown:
            continue
        above = task.upstream_task_ids
        for one in above & set().union(*(ancestors(other) for other in above)):
            task.upstream_task_ids.discard(one)
            dag.task_dict[one].downstream_task_ids.discard(name)
