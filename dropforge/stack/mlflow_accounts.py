"""Who may do what in the stack's MLflow: accounts of MLflow's basic-auth, made as they should be at each start.

A person's account may do all. Airflow's makes experiments, runs, models and their aliases, and removes them. That of
trainings writes to runs that are there and reads models, see `mlflow_guard`: code of a recipe cannot move an alias or
take a model's name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from dropforge.stack.secrets import Secrets

if TYPE_CHECKING:
    from mlflow.server.auth.sqlalchemy_store import SqlAlchemyStore

_WORKSPACE: Final = "default"  # the one that there is while MLflow's workspaces are off


@dataclass(frozen=True)
class Account:
    """:param grants: MLflow's permission on all things of a type; without any, the account is the administrator's."""

    name: str
    grants: Mapping[str, str] = field(default_factory=dict)


PERSON: Final = Account("admin")
AIRFLOW: Final = Account("airflow", {"experiment": "MANAGE", "registered_model": "MANAGE"})
# The tags of a checkpoint's logged model are taken away too, which MLflow counts as removing.
TRAINER: Final = Account("trainer", {"experiment": "EDIT", "logged_model": "MANAGE", "registered_model": "READ"})
_ALL: Final = (PERSON, AIRFLOW, TRAINER)


def passwords(secrets: Secrets) -> dict[str, str]:
    """By the names of the accounts."""
    return {
        PERSON.name: secrets.mlflow_password,
        AIRFLOW.name: secrets.mlflow_airflow_password,
        TRAINER.name: secrets.mlflow_trainer_password,
    }


def password(account: Account, secrets: Secrets) -> str:
    return passwords(secrets)[account.name]


def login(account: Account, secrets: Secrets) -> dict[str, str]:
    """The variables with which every client of MLflow logs in."""
    return {"MLFLOW_TRACKING_USERNAME": account.name, "MLFLOW_TRACKING_PASSWORD": password(account, secrets)}


def configuration(database: str) -> str:
    """MLflow's basic_auth.ini.

    :param database: SQLAlchemy's address of the database of the accounts; it may hold a password.
    """
    lines = {
        "database_uri": database.replace("%", "%%"),
        "default_permission": "READ",
        "admin_username": PERSON.name,
        # A password costs tens of milliseconds to check. There is one process, which forgets those that it changes.
        "auth_cache_ttl_seconds": "3600",
    }
    return "".join(["[mlflow]\n", *(f"{name} = {value}\n" for name, value in lines.items())])


def provide(store: SqlAlchemyStore, secrets: Secrets) -> None:
    """Make the accounts, or give those that are there the passwords and the roles that they should have."""
    for account in _ALL:
        secret = password(account, secrets)
        if not store.has_user(account.name):
            store.create_user(account.name, secret)
        elif not store.authenticate_user(account.name, secret):
            store.update_user(account.name, password=secret)
        user = store.get_user(account.name)
        if user.is_admin == bool(account.grants):
            store.update_user(account.name, is_admin=not account.grants)
        if account.grants:
            _grant(store, user.id, account)


def _grant(store: SqlAlchemyStore, user: int, account: Account) -> None:
    name = f"dropforge-{account.name}"
    role = next((role for role in store.list_roles([_WORKSPACE]) if role.name == name), None)
    role = role or store.create_role(name, _WORKSPACE)
    for held in store.list_role_permissions(role.id):
        store.remove_role_permission(held.id)
    for kind, permission in account.grants.items():
        store.add_role_permission(role.id, kind, "*", permission)
    if role.id not in {known.id for known in store.list_user_roles(user)}:
        store.assign_role_to_user(user, role.id)
