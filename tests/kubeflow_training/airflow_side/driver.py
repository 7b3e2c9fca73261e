"""A process with a real Airflow database that does on request what scheduler, worker and triggerer do.

One request per line on standard input, one answer per line on the file descriptor given as argument. A killed one is
back at once, as the fork of a process that has Airflow loaded; each tells its process number first.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
from datetime import UTC, datetime
from typing import Any

from airflow import settings
from airflow.models.taskinstance import TaskInstance, clear_task_instances
from sqlalchemy import select


def load() -> dict[str, Any]:
    """Parse the DAG folder and write it into the database; the DAGs by name."""
    from airflow.dag_processing.bundles.manager import DagBundlesManager
    from airflow.dag_processing.dagbag import BundleDagBag, sync_bag_to_db

    manager = DagBundlesManager()
    manager.sync_bundles_to_db()
    bundle = next(iter(manager.get_all_dag_bundles()))
    bundle.initialize()
    bag = BundleDagBag(dag_folder=bundle.path, bundle_path=bundle.path, bundle_name=bundle.name)
    assert not bag.import_errors, bag.import_errors
    sync_bag_to_db(bag, bundle.name, bundle.version)
    return dict(bag.dags)


def plain(value: Any) -> Any:
    """An XCom's value; the column may hold it encoded once more."""
    try:
        return json.loads(value)
    except (TypeError, ValueError):
        return value


class Driver:
    def __init__(self) -> None:
        self.dags = load()

    def create(self, dag: str, run: str, conf: dict[str, Any]) -> None:
        from airflow.models.serialized_dag import SerializedDagModel
        from airflow.utils.state import DagRunState
        from airflow.utils.types import DagRunTriggeredByType, DagRunType

        SerializedDagModel.get_dag(dag).create_dagrun(
            run_id=run,
            run_after=datetime.now(UTC),
            run_type=DagRunType.MANUAL,
            triggered_by=DagRunTriggeredByType.TEST,
            state=DagRunState.RUNNING,
            conf=conf,
        )

    def instance(self, dag: str, run: str, task: str = "train") -> TaskInstance:
        settings.Session.remove()
        query = select(TaskInstance).filter_by(dag_id=dag, run_id=run, task_id=task)
        return settings.Session().scalars(query).one()

    def attempt(self, dag: str, run: str, task: str = "train") -> dict[str, Any]:
        """The next try of the task, trigger included; its state and error."""
        from airflow.sdk.definitions.dag import _run_task

        ti = self.instance(dag, run, task)
        ti.try_number += 1
        ti.state = "scheduled"
        settings.Session().commit()
        result = _run_task(ti=ti, task=self.dags[dag].task_dict[task], run_triggerer=True)
        ti.clear_next_method_args()
        settings.Session().commit()
        return {
            "state": str(getattr(ti.state, "value", ti.state)),
            "error": str(result.error) if result and result.error else None,
            "kind": type(result.error).__name__ if result and result.error else None,
        }

    def clear(self, dag: str, run: str) -> None:
        session = settings.Session()
        clear_task_instances([self.instance(dag, run)], session)
        session.commit()

    def set_state(self, dag: str, run: str, state: str | None) -> None:
        self.instance(dag, run).set_state(state)
        settings.Session().commit()

    def set_conf(self, dag: str, run: str, conf: dict[str, Any]) -> None:
        self.instance(dag, run).dag_run.conf = conf
        settings.Session().commit()

    def forget(self, dag: str, run: str) -> None:
        """Delete the DAG run with all its tasks."""
        from airflow.models.dagrun import DagRun

        with settings.Session.session_factory() as session:
            session.delete(session.scalars(select(DagRun).filter_by(dag_id=dag, run_id=run)).one())
            session.commit()

    def set_variable(self, key: str, value: str) -> None:
        from airflow.models import Variable

        Variable.set(key, value)
        settings.Session().commit()

    def look(self, dag: str, run: str) -> dict[str, Any]:
        """What the database holds about the task."""
        from airflow.models.task_state_store import TaskStateStoreModel
        from airflow.models.xcom import XComModel

        ti = self.instance(dag, run)
        session = settings.Session()
        xcoms = session.scalars(select(XComModel).filter_by(dag_id=dag, run_id=run, task_id="train"))
        rows = session.scalars(select(TaskStateStoreModel).filter_by(dag_id=dag, run_id=run, task_id="train"))
        return {
            "state": ti.state,
            "xcoms": {row.key: plain(row.value) for row in xcoms},
            "store": {row.key: json.loads(row.value) for row in rows},
        }

    def links(self, dag: str, run: str, task: str = "train") -> dict[str, Any]:
        """The task's links as Airflow's UI API tells them."""
        from airflow.api_fastapi.common.dagbag import create_dag_bag
        from airflow.api_fastapi.core_api.routes.public.extra_links import get_extra_links

        settings.Session.remove()
        with settings.Session() as session:
            found = get_extra_links(dag, run, task, session, create_dag_bag())
        return dict(found.extra_links)

    def expiry(self, dag: str, run: str) -> dict[str, Any]:
        """When what the task stored is forgotten, by key."""
        from airflow.models.task_state_store import TaskStateStoreModel

        rows = settings.Session().scalars(select(TaskStateStoreModel).filter_by(dag_id=dag, run_id=run))
        return {row.key: row.expires_at for row in rows}

    def forget_state(self, dag: str, run: str) -> None:
        """Empty the task's state store."""
        from airflow.models.task_state_store import TaskStateStoreModel
        from sqlalchemy import delete

        session = settings.Session()
        session.execute(delete(TaskStateStoreModel).filter_by(dag_id=dag, run_id=run))
        session.commit()

    def kill_trigger(
        self, dag: str, run: str, state: str | None, arguments: dict[str, Any], seconds: float = 0.5
    ) -> None:
        """Run a trigger, set the task's state, and have the triggerer's own runner cancel it as for a user's action.

        :param seconds: until it is cancelled, if it has not ended by itself.
        """
        from airflow.jobs import triggerer_job_runner as triggerer

        async def run_and_cancel(trigger: Any) -> None:
            runner = triggerer.TriggerRunner()
            runner.triggers[1] = {"task": None, "is_watcher": False, "name": "test", "events": 0}
            task = asyncio.create_task(runner.run_trigger(1, trigger))
            await asyncio.wait({task}, timeout=seconds)
            self.set_state(dag, run, state)
            task.cancel(triggerer._USER_ACTION_CANCEL_MSG)
            await asyncio.gather(task, return_exceptions=True)

        self._with_trigger(dag, run, arguments, run_and_cancel)

    def stop_trigger(self, dag: str, run: str, arguments: dict[str, Any], lines: int) -> None:
        """Run a trigger until it has shown some lines, and stop it as a triggerer that shuts down does."""

        async def run_for_a_while(trigger: Any) -> None:
            async def consume() -> None:
                async for _ in trigger.run():
                    return

            shown: list[str] = []
            trigger.log.info = lambda _format, line: shown.append(line)
            task = asyncio.create_task(consume())
            while len(shown) < lines:  # noqa: ASYNC110 - the trigger knows no event for this
                await asyncio.sleep(0.01)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await trigger.cleanup()

        self._with_trigger(dag, run, arguments, run_for_a_while)

    def _with_trigger(self, dag: str, run: str, arguments: dict[str, Any], what: Any) -> None:
        import psutil
        import structlog
        from airflow.sdk.execution_time.supervisor import (
            InProcessSupervisorComms,
            InProcessTestSupervisor,
            set_supervisor_comms,
        )
        from kubeflow_training.triggers import PyTorchJobTrigger

        ti = self.instance(dag, run)
        trigger = PyTorchJobTrigger(**arguments)
        trigger.task_instance = ti
        supervisor = InProcessTestSupervisor(
            id=ti.id,
            pid=os.getpid(),
            process=psutil.Process(),
            process_log=structlog.get_logger(),
            client=InProcessTestSupervisor._api_client(),
        )
        supervisor.comms = InProcessSupervisorComms(supervisor=supervisor)
        with set_supervisor_comms(supervisor.comms):
            asyncio.run(what(trigger))


class Worker:
    """Tries whose process may die: each in a fork of a process that has Airflow loaded and has done nothing yet."""

    def __init__(self, driver: Driver) -> None:
        read, self._write = os.pipe()
        self._read, write = os.pipe()
        if os.fork() == 0:
            os.close(self._write)
            os.close(self._read)
            requests, answers = os.fdopen(read), os.fdopen(write, "w", buffering=1)
            for line in requests:
                answers.write(json.dumps(self._try(driver, json.loads(line)), default=str) + "\n")
            os._exit(0)
        os.close(read)
        os.close(write)
        self.requests, self.answers = os.fdopen(self._write, "w", buffering=1), os.fdopen(self._read)

    def _try(self, driver: Driver, request: dict[str, Any]) -> dict[str, Any]:
        read, write = os.pipe()
        if (pid := os.fork()) == 0:
            settings.engine.dispose(close=False)
            settings.Session.remove()
            with os.fdopen(write, "w") as answer:
                answer.write(json.dumps(driver.attempt(**request), default=str))
            os._exit(0)
        os.close(write)
        with os.fdopen(read) as answer:
            text = answer.read()
        _, status = os.waitpid(pid, 0)
        return json.loads(text) if text else {"killed": os.WTERMSIG(status) if os.WIFSIGNALED(status) else None}

    def attempt(self, **request: Any) -> dict[str, Any]:
        self.requests.write(json.dumps(request) + "\n")
        return json.loads(self.answers.readline())


def make_api() -> None:
    """The API's routes, which each process would take seconds to make at its first request; starts no thread."""
    from airflow.sdk.execution_time.supervisor import in_process_api_server

    in_process_api_server().app._cadwyn_initialize()


def serve(driver: Driver, answers: Any) -> None:
    """Do what is asked for until there are no more requests."""
    settings.engine.dispose(close=False)
    settings.Session.remove()
    driver.attempt_in_fork = Worker(driver).attempt
    answers.write(json.dumps({"pid": os.getpid()}) + "\n")
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"value": getattr(driver, request.pop("do"))(**request)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer, default=str) + "\n")


def main() -> None:
    answers = os.fdopen(int(sys.argv[1]), "w", buffering=1)
    driver = Driver()
    make_api()
    gc.collect()
    gc.freeze()
    while True:
        if (pid := os.fork()) == 0:
            serve(driver, answers)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        if not os.WIFSIGNALED(status):
            return


if __name__ == "__main__":
    main()
