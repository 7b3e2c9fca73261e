"""Who may see the pages: with Airflow's own API server, its logins and an auth manager with rights per DAG."""

from __future__ import annotations

import pytest
from dropforge_airflow.assets import FINETUNE_DAG
from dropforge_airflow.pages.rights import SEES_RUNS
from dropforge_airflow.pages.routes import make_app
from fastapi.routing import APIRoute

from tests.dropforge_airflow.pages.conftest import Server

PAGES = ("task", "task.json", "families", "family.json")


def test_every_route_names_its_dag_and_asks_for_rights_on_it() -> None:
    routes = [route for route in make_app().routes if isinstance(route, APIRoute)]
    shown = [route for route in routes if not route.path.startswith("/static/")]
    assert len(shown) == len(PAGES) + 1  # the card, which asks for more
    for route in shown:
        assert route.path.startswith("/dags/{dag_id}/")
        assert SEES_RUNS in route.dependencies
        assert route.methods == {"GET"}


@pytest.mark.parametrize("page", PAGES)
def test_without_login_nothing_is_shown(server: Server, page: str) -> None:
    server.client.cookies.clear()
    assert server.get(f"/dags/{FINETUNE_DAG}/{page}", user=None, run_id="any").status_code == 401
    assert server.client.get(f"/dropforge/dags/{FINETUNE_DAG}/task?run_id=<b>").text.startswith("Log in to Airflow")
    forged = server.client.get(
        f"/dropforge/dags/{FINETUNE_DAG}/{page}", params={"run_id": "any"}, headers={"Authorization": "Bearer a.b.c"}
    )
    assert forged.status_code in (401, 403)


@pytest.mark.parametrize("page", PAGES)
def test_a_viewer_may_look_and_a_user_without_the_dag_may_not(server: Server, page: str) -> None:
    run = server.run(f"manual__{page}")
    path = f"/dags/{FINETUNE_DAG}/{page}"
    assert server.get(path, run_id=run).status_code == 200
    assert server.get(path, user="elsewhere", run_id=run).status_code == 403
    assert server.get(path, user="nobody", role="", run_id=run).status_code == 403


def test_who_sees_no_tasks_or_no_logs_sees_none(server: Server) -> None:
    run = server.run("manual__parts")
    path = f"/dags/{FINETUNE_DAG}/task.json"
    assert server.get(path, user="runsonly", run_id=run).status_code == 403
    answer = server.get(path, user="nologs", run_id=run)
    assert answer.status_code == 200
    assert answer.json()["log"] is None
    assert server.get(path, run_id=run).json()["log"] is not None


def test_another_dag_is_no_way_in(server: Server) -> None:
    run = server.run("manual__hidden")
    server.run("manual__other", dag="other")
    for dag in ("other", "~", "..", "dropforge_finetune2", "%2e%2e"):
        # This user may read all of them.
        for page in ("task.json", "family.json"):
            answer = server.get(f"/dags/{dag}/{page}", user="elsewhere", run_id=run)
            assert answer.status_code in (403, 404), dag
            assert "manual__hidden" not in answer.text
    # A parameter of the query does not replace the DAG of the path.
    answer = server.get(f"/dags/{FINETUNE_DAG}/task.json", user="elsewhere", run_id=run, dag_id="other")
    assert answer.status_code == 403
    assert server.tab("manual__other").status_code == 404


@pytest.mark.parametrize(
    "run", ["", "../manual__here", "manual__here/../x", "%", "' OR 1=1 --", "a" * 251, "\x00", "manual__here\n"]
)
def test_what_is_no_run_shows_nothing(server: Server, run: str) -> None:
    server.runs or server.run("manual__here")
    assert server.tab(run).status_code in (404, 422)


def test_scripts_and_styles_are_our_own_files_only(server: Server) -> None:
    for name, kind in (("frame.js", "javascript"), ("task.js", "javascript"), ("page.css", "css")):
        answer = server.get(f"/static/{name}", user=None)
        assert answer.status_code == 200
        assert kind in answer.headers["content-type"]
        assert "http://" not in answer.text.replace("http://www.w3.org/2000/svg", "")
    for name in ("task.html", "..%2froutes.py", "../routes.py", "%2e%2e/plugin.py", "x"):
        assert "router" not in server.get(f"/static/{name}", user=None).text
    assert f'"{FINETUNE_DAG}"' in server.get("/static/frame.js", user=None).text
    page = server.get(f"/dags/{FINETUNE_DAG}/task", run_id="any")
    assert "script-src 'self'" in page.headers["content-security-policy"]
    assert "frame-ancestors 'self'" in page.headers["content-security-policy"]
