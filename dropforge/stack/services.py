"""What the stack consists of: each service's command, environment, and how one sees that it is ready."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dropforge.proxies import spared
from dropforge.source_root import source_root
from dropforge.stack import health, mlflow_accounts
from dropforge.stack.databases import Databases, data_folder
from dropforge.stack.kubeconfig import kubeconfig_env
from dropforge.stack.secrets import Secrets, read_own, write_private
from dropforge.stack.state import AIRFLOW_USER, REGION, client_env

LOCAL = "127.0.0.1"
_FOR_PODS = {"objects", "mlflow"}
CLUSTER = "kubeflow_training.jobs.local"
FOLDERS = ("logs", "airflow", "cluster", "tmp")  # of the state folder, besides those that services make themselves
_DATABASE = "database"
_API_BODY = 64 << 20
_CONNECT_ARGS = {
    "sql_alchemy_connect_args": "dropforge_airflow.postgres.CONNECT_ARGS",
    "sql_alchemy_connect_args_async": "dropforge_airflow.postgres.CONNECT_ARGS_ASYNC",
}
# DAGs that people's drops and commands start: who is told that the stack is ready shall not hear that there are none.
_STARTED_BY_PEOPLE = {
    "dropforge_finetune": "finetune.py",
    "dropforge_intake": "intake.py",
    "dropforge_rollback": "rollback.py",
    "dropforge_sweep": "sweep.py",
}
# What Airflow's parts are called in its table of heartbeats.
_JOBS = {"scheduler": "SchedulerJob", "triggerer": "TriggererJob", "dag_processor": "DagProcessorJob"}
# Variables of the caller that would reach into the stack from outside.
_FOREIGN = ("AIRFLOW_", "AIRFLOW__", "AWS_", "MLFLOW_", "DROPFORGE_", "KUBEFLOW_TRAINING_", "_MLFLOW", "_AIRFLOW", "PG")
# What a person may set for the DAGs, and the size of the local cluster.
_WELCOME = (
    "DROPFORGE_PRESET",
    "DROPFORGE_PRESETS",
    "DROPFORGE_SELF_SERVICE",
    "DROPFORGE_INSTANCES",
    "DROPFORGE_LIMITS",
    "DROPFORGE_MAX_ACTIVE_RUNS_PER_FAMILY",
    "DROPFORGE_READABLE",
    "DROPFORGE_FAMILIES",
    "DROPFORGE_DROP_PATIENCE",
    "DROPFORGE_DROP_BUCKETS",
    "DROPFORGE_NOTIFY",
    "DROPFORGE_GIT",
    "KUBEFLOW_TRAINING_CPUS",
    "KUBEFLOW_TRAINING_MEMORY_GB",
    "KUBEFLOW_TRAINING_GPUS",
    "KUBEFLOW_TRAINING_NAMESPACES",
)
_WELCOME_SECTIONS = ("AIRFLOW__OPENLINEAGE__", "AIRFLOW__METRICS__")
# Secrets of curation.
_CURATING = ("DROPFORGE_PII_KEY",)

# What Airflow's parts have in common. Only modules that start nothing; none of ours, which may change meanwhile.
_AIRFLOW_MODULES = (
    "airflow.__main__",
    "airflow.cli.commands.api_server_command",
    "airflow.cli.commands.dag_processor_command",
    "airflow.cli.commands.scheduler_command",
    "airflow.cli.commands.triggerer_command",
    "airflow.api_fastapi.core_api.app",
    "airflow.api_fastapi.execution_api.app",
    "airflow.executors.local_executor",
    "airflow.providers.amazon.aws.hooks.s3",
    "airflow.sdk.execution_time.task_runner",
    # Tasks are forks of the scheduler's workers; half of them would spend seconds on this import.
    "mlflow.tracking",
)


@dataclass(frozen=True)
class Service:
    """One process and its descendants.

    :param ready: tells whether the service that started at this time (seconds since 1970) is ready; may raise OSError.
    :param after: names of services that must be ready (or done) first.
    :param once: it runs to its end instead of staying.
    :param preload: modules that it shares with the other services of the same; empty for a start of its own.
    :param check_every: seconds between looks at a healthy service.
    :param patience: seconds until a service that is not ready is said to be stuck and is restarted.
    :param serves: how many kinds of services write to it until their last moment: it is stopped after those.
    :param stop_signal: what asks it to end.
    :param within: folder in which all of its processes work, and no other's: by that they are found without it.
    :param told_by: name of the service that tells whether this one is well; while that is away, nobody asks.
    :param before: what is done before each start.
    :param hosts: addresses of this machine on which it listens at its port.
    """

    name: str
    module: str
    arguments: tuple[str, ...]
    env: dict[str, str]
    ready: Callable[[float], bool]
    port: int | None = None
    after: tuple[str, ...] = ()
    once: bool = False
    preload: tuple[str, ...] = ()
    check_every: float = 10.0
    patience: float = 180.0
    serves: int = 0
    stop_signal: signal.Signals = signal.SIGTERM
    within: Path | None = None
    told_by: str = ""
    before: Callable[[], None] = lambda: None
    hosts: tuple[str, ...] = (LOCAL,)

    @property
    def command(self) -> tuple[str, ...]:
        return (sys.executable, "-P", "-m", self.module, *self.arguments)


def hosts(name: str, pod_host: str | None) -> tuple[str, ...]:
    """The addresses on which a service of the stack listens."""
    return (LOCAL, pod_host) if pod_host and name in _FOR_PODS else (LOCAL,)


def services(folder: Path, ports: dict[str, int], secrets: Secrets, pod_host: str | None = None) -> list[Service]:
    """The stack's services in the order in which they start; those that serve the others stop last.

    :param pod_host: an address of this machine on which S3 and MLflow listen too, for the pods of a cluster.
    """
    for_pods = ("--pod-host", pod_host) if pod_host else ()
    env = base_env(folder, ports, secrets)
    env |= kubeconfig_env(folder / "kubeconfig", os.environ, env)
    databases = Databases.of(folder)
    libpq = {name: value for name, value in os.environ.items() if name.startswith("PG") and not databases.embedded}
    login = mlflow_accounts.login(mlflow_accounts.AIRFLOW, secrets)
    airflow = {**env, **libpq, **login, **airflow_env(folder, ports, secrets, databases)}
    # Curation runs in the scheduler's workers; code of recipes, which could undo pseudonyms, in pods of the cluster.
    curating = {name: os.environ[name] for name in _CURATING if name in os.environ}

    wanted = {dag: file for dag, file in _STARTED_BY_PEOPLE.items() if (source_root() / "dags" / file).exists()}
    dags_read = health.DagsRead(ports["airflow"], AIRFLOW_USER, secrets.airflow_password, wanted)

    def airflow_service(name: str, *arguments: str, part: str) -> Service:
        return Service(
            name,
            "airflow",
            arguments,
            {**airflow, **(curating if part == "scheduler" else {})},
            ready=lambda since: (
                health.airflow_part(ports["airflow"], part, since) and (part != "dag_processor" or dags_read())
            ),
            port=ports["airflow"] if part == "metadatabase" else None,
            after=("airflow-db", _DATABASE),
            preload=_AIRFLOW_MODULES,
            told_by=_DATABASE if part == "metadatabase" else "airflow-api",
            before=lambda: databases.end_future_heartbeats(_JOBS[part], time.time()) if part in _JOBS else None,
        )

    found = [
        Service(
            "objects",
            "dropforge.stack.objects",
            ("--state", str(folder), "--port", str(ports["objects"]), *for_pods),
            env,
            ready=lambda _: health.answers(ports["objects"], "/-/health"),
            port=ports["objects"],
            hosts=hosts("objects", pod_host),
            serves=1,
        ),
        Service(
            "airflow-db",
            "airflow",
            ("db", "migrate"),
            airflow,
            ready=lambda _: False,
            after=(_DATABASE,),
            once=True,
            preload=_AIRFLOW_MODULES,
        ),
        Service(
            "mlflow",
            "dropforge.stack.tracking_server",
            (
                *("--state", str(folder), "--port", str(ports["mlflow"]), "--artifacts", "s3://dropforge/mlflow"),
                *for_pods,
            ),
            {**env, **libpq, **mlflow_env(folder, databases)},
            ready=lambda _: health.answers(ports["mlflow"], "/health"),
            port=ports["mlflow"],
            hosts=hosts("mlflow", pod_host),
            after=(_DATABASE,),
            serves=1,
            told_by=_DATABASE,
        ),
        airflow_service("airflow-api", "api-server", part="metadatabase"),
        # Logs are read from the same disk, so nobody needs the log servers, which listen on every address.
        airflow_service("airflow-scheduler", "scheduler", "--skip-serve-logs", part="scheduler"),
        airflow_service("airflow-triggerer", "triggerer", "--skip-serve-logs", part="triggerer"),
        airflow_service("airflow-dag-processor", "dag-processor", part="dag_processor"),
    ]
    if databases.embedded:
        found.insert(
            0,
            Service(
                _DATABASE,
                "dropforge.stack.postgres",
                ("--state", str(folder)),
                env,
                ready=lambda _: databases.answers(),
                serves=2,
                stop_signal=signal.SIGINT,  # it does not wait for those that are connected
                within=data_folder(folder).resolve(),
            ),
        )
    if databases.embedded and _migrated(folder):
        found = [service for service in found if service.name != "airflow-db"]
    if _exists(f"{CLUSTER}.__main__"):
        works = health.LocalCluster(Path(env["KUBEFLOW_TRAINING_HOME"]))
        pods = {**env, **mlflow_accounts.login(mlflow_accounts.TRAINER, secrets)}
        found.insert(1, Service("cluster", CLUSTER, (), pods, ready=lambda _: works()))
    return found


def prepare(folder: Path, secrets: Secrets) -> None:
    """Make the folders and files that the services expect."""
    for name in FOLDERS:
        (folder / name).mkdir(mode=0o700, parents=True, exist_ok=True)
    write_private(passwords_path(folder), json.dumps({AIRFLOW_USER: secrets.airflow_password}))
    source_root()


def note_migrated(folder: Path) -> None:
    """Airflow's database fits the installed Airflow; the next start need not look."""
    write_private(folder / "airflow" / "migrated", airflow_version())


def _migrated(folder: Path) -> bool:
    try:
        noted = read_own(folder / "airflow" / "migrated")
    except (OSError, ValueError):  # a migration that finds nothing to do costs seconds
        return False
    return noted == airflow_version() and data_folder(folder).is_dir()


def passwords_path(folder: Path) -> Path:
    return folder / "airflow" / "passwords.json"


def airflow_version() -> str:
    """Version of the installed Airflow: its database must be migrated once for each."""
    return importlib.metadata.version("apache-airflow-core")


def base_env(folder: Path, ports: dict[str, int], secrets: Secrets) -> dict[str, str]:
    """The environment of every service: the caller's without what reaches into the stack, plus the stack's own."""
    env = {
        name: value
        for name, value in os.environ.items()
        if name in _WELCOME or name.startswith(_WELCOME_SECTIONS) or not name.startswith(_FOREIGN)
    }
    binaries = str(Path(sys.executable).parent)
    return {
        **env,
        **client_env(folder, ports, secrets),
        "PATH": os.pathsep.join([binaries, env.get("PATH", os.defpath)]),
        "PYTHONUNBUFFERED": "1",
        "NO_COLOR": "1",
        **spared(env),
        "DO_NOT_TRACK": "1",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "AIRFLOW_HOME": str(folder / "airflow"),
        "AIRFLOW_CONN_DROPFORGE_S3": json.dumps(
            {
                "conn_type": "aws",
                "login": secrets.access_key,
                "password": secrets.secret_key,
                "extra": {"endpoint_url": f"http://127.0.0.1:{ports['objects']}", "region_name": REGION},
            }
        ),
    }


def mlflow_env(folder: Path, databases: Databases) -> dict[str, str]:
    return {
        "MLFLOW_BACKEND_STORE_URI": databases.address("mlflow"),
        # Its background jobs are processes of several hundred megabytes that nothing here uses.
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "TMPDIR": str(folder / "tmp"),
    }


def _is_installed() -> bool:
    return bool(importlib.metadata.entry_points(group="airflow.plugins", name="dropforge"))


def airflow_env(folder: Path, ports: dict[str, int], secrets: Secrets, databases: Databases) -> dict[str, str]:
    """Airflow's configuration: few processes, quick reactions, nothing outside 127.0.0.1."""
    root, home, url = source_root(), folder / "airflow", f"http://127.0.0.1:{ports['airflow']}"
    options = {
        "core": {
            "executor": "LocalExecutor",
            "parallelism": "4",
            "dags_folder": str(root / "dags"),
            # An installed package's plugin is found by its entry point; one that is found twice is an error to Airflow.
            **({} if _is_installed() else {"plugins_folder": str(root / "plugins")}),
            "load_examples": "False",
            "dags_are_paused_at_creation": "False",
            "auth_manager": "airflow.api_fastapi.auth.managers.simple.simple_auth_manager.SimpleAuthManager",
            "simple_auth_manager_users": f"{AIRFLOW_USER}:admin",
            "simple_auth_manager_passwords_file": str(passwords_path(folder)),
            "execution_api_server_url": f"{url}/execution/",
            "fernet_key": secrets.fernet_key,
            # The default asks name servers, which takes seconds where there are none.
            "hostname_callable": "socket.gethostname",
            "mp_start_method": "fork",
            "min_serialized_dag_update_interval": "5",
        },
        "database": {
            "sql_alchemy_conn": databases.address("airflow"),
            "sql_alchemy_conn_async": databases.address("airflow", driver="asyncpg"),
            **({} if databases.embedded else _CONNECT_ARGS),
        },
        "api": {
            "host": "127.0.0.1",
            "port": str(ports["airflow"]),
            "base_url": url,
            "workers": "1",
            "secret_key": secrets.api_secret_key,
            "instance_name": "Dropforge",
        },
        # A clock that is set by up to a day ends no task that runs: its token would not be valid yet, or no more.
        "api_auth": {"jwt_secret": secrets.jwt_secret, "jwt_leeway": str(25 * 3600)},
        # Tasks end with a scheduler that is killed; the next one shall not wait five minutes before it takes them up.
        "scheduler": {"scheduler_idle_sleep_time": "0.5", "orphaned_tasks_check_interval": "10"},
        # So often a worker looks whether its task's process has ended. Until then the executor's place is taken, and a
        # task that an answer or a trigger resumes meanwhile may be taken for ended.
        "workers": {"min_heartbeat_interval": "1"},
        "triggerer": {"capacity": "1000"},
        "dag_processor": {
            "refresh_interval": "30",
            # A changed file is read at once; an unchanged one need not be read twice a minute.
            "min_file_process_interval": "600",
            "stale_dag_threshold": "660",
            "parsing_processes": "2",
        },
        "logging": {
            "base_log_folder": str(home / "logs"),
            "colored_console_log": "False",
            # Addresses as long as anybody likes, with what is in their queries, are in no log.
            "namespace_levels": "http.access=WARNING",
        },
    }
    options_env = {
        f"AIRFLOW__{section.upper()}__{name.upper()}": value
        for section, values in options.items()
        for name, value in values.items()
    }
    # Libraries that start threads while they are imported could not be forked: OpenBLAS, OpenMP, Arrow's allocator.
    threads = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    limit = {"DROPFORGE_API_LARGEST_BODY": str(_API_BODY)}  # see dropforge_airflow.body_limit
    return {**options_env, **threads, **limit, "JE_ARROW_MALLOC_CONF": "background_thread:false"}


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
