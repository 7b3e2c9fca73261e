"""The pages say what the code is: excerpts, arguments, reasons, numbers, variables, and links that lead somewhere."""

from __future__ import annotations

import ast
import re

import pytest
from kubeflow_training.jobs.budgets import BACKOFFS, BUDGETS
from kubeflow_training.jobs.observation.phases import Phase
from kubeflow_training.jobs.observation.reasons import EXIT_CODES, RETRYABLE, Reason

from tests.kubeflow_training.docs.pages import PACKAGE, PAGES, Signature, pages, quoted, tables, with_excerpts

PUBLIC = (
    "operators.PyTorchJobOperator",
    "sensors.PyTorchJobSensor",
    "triggers.PyTorchJobTrigger",
    "hooks.PyTorchJobHook",
    "hooks.PyTorchJobHook.waiting",
    "hooks.AsyncPyTorchJobHook",
    "hooks.AsyncPyTorchJobHook.get",
    "hooks.AsyncPyTorchJobHook.list",
    "hooks.AsyncPyTorchJobHook.watch",
    "hooks.AsyncPyTorchJobHook.create",
    "hooks.AsyncPyTorchJobHook.delete",
    "retries.RetryBudget",
    "retries.RetryByCause",
    "retries.SharedBudget",
    "reaper.JobReaperOperator",
    "jobs.budgets.Backoff",
    "jobs.spec.TrainingJobSpec",
    "jobs.spec.ElasticPolicy",
    "jobs.elastic.elastic",
    "jobs.elastic.resized",
    "jobs.kinds.compile.compiled",
    "jobs.kinds.compile.train_job",
    "jobs.kinds.compile.training_runtime",
    "jobs.local.cluster.LocalCluster",
    "jobs.observation.reader.observe",
    "jobs.render.render",
)


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.stem)
def test_excerpts_are_what_the_examples_say(page):
    text = page.read_text()
    assert text == with_excerpts(text), "write them again: python -m tests.kubeflow_training.docs.pages"


def test_every_excerpt_of_the_examples_is_quoted():
    marked = {
        (file.name, name)
        for file in (PACKAGE / "example_dags").iterdir()
        if file.is_file()
        for name in re.findall(r"# \[START (\w+)\]", file.read_text())
    }
    assert quoted() == marked


def test_everything_public_has_its_table():
    assert sorted(tables("arguments")) == sorted(PUBLIC)
    for module in ("operators", "sensors", "triggers", "hooks", "retries", "reaper"):
        tree = ast.parse((PACKAGE / f"{module}.py").read_text())
        classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
        for node in classes:
            assert f"{module}.{node.name}" in PUBLIC
            for function in node.body:
                own = isinstance(function, ast.AsyncFunctionDef) and not function.name.startswith(("_", "on_", "run"))
                takes = own and len(function.args.args) + len(function.args.kwonlyargs) > 1
                assert not takes or f"{module}.{node.name}.{function.name}" in PUBLIC


@pytest.mark.parametrize("about", PUBLIC)
def test_every_argument_is_documented_with_its_default(about):
    told, signature = tables("arguments")[about], Signature(about)
    assert list(told) == list(signature.parameters)
    for name, default in signature.parameters.items():
        if default is None:
            assert told[name] == "required", name
            continue
        try:
            value = ast.literal_eval(default)
        except ValueError:
            assert told[name] not in ("", "required"), name  # computed: in words
            continue
        texts = {str(value), repr(value), '""' if value == "" else str(value)}
        assert told[name].strip("`") in texts, f"{name}: the page says {told[name]}, the code {default}"


@pytest.mark.parametrize("about", PUBLIC)
def test_docstrings_name_every_argument(about):
    signature = Signature(about)
    assert set(signature.parameters) - signature.documented == set()


def test_the_commands_options_are_documented():
    source = (PACKAGE / "reap.py").read_text()
    assert list(tables("options")["kubeflow_training.reap"]) == re.findall(r'"(--[a-z-]+)"', source)


def test_every_environment_variable_is_documented():
    text = "".join(page.read_text() for page in pages())
    for file in PACKAGE.rglob("*.py"):
        for name in re.findall(r'"((?:KUBEFLOW_TRAINING|AIRFLOW_API)_[A-Z_]+)"', file.read_text()):
            assert f"`{name}`" in text or f"{name}=" in text or name == "KUBEFLOW_TRAINING_POD_UID", (file, name)


def rows(page: str, first: str) -> dict[str, list[str]]:
    """The table whose head begins with `first`: its rows by their first cell."""
    text = (PAGES / page).read_text()
    table = re.search(rf"^\| {first} \|.*\n\|[-|]+\n((?:\|.*\n)+)", text, re.M)
    assert table
    cells = [[cell.strip() for cell in line.strip("|\n ").split("|")] for line in table[1].splitlines()]
    return {row[0].strip("`"): row[1:] for row in cells}


def test_phases_and_reasons_are_explained():
    assert list(rows("troubleshooting.md", "phase")) == [str(phase) for phase in Phase]
    assert list(rows("troubleshooting.md", "reason")) == [str(reason) for reason in Reason]


def test_budgets_and_delays_are_those_of_the_code():
    found = rows("retries.md", "reason")
    assert set(found) == {str(reason) for reason in Reason}
    for reason in Reason:
        budget, delays, otherwise = found[str(reason)]
        assert int(budget) == BUDGETS.get(reason, 0)
        numbers = [int(number) for number in re.findall(r"\d+", delays)]
        backoff = BACKOFFS.get(reason)
        assert numbers == ([backoff.seconds(1), backoff.seconds(2)] if backoff else [])
        assert (otherwise == "none") == (not RETRYABLE[reason])


def test_exit_codes_are_those_of_the_code():
    found: dict[int, list[str]] = {}
    for codes, cells in rows("operator-results.md", "exit code").items():
        for code in re.findall(r"\d+", codes):
            found[int(code)] = cells
    assert set(found) - {0} == set(EXIT_CODES)
    for code, reason in EXIT_CODES.items():
        meaning, again = found[code]
        assert meaning.startswith(str(reason))
        assert (again == "yes") == RETRYABLE[reason]


def test_the_shipped_roles_are_explained():
    files = sorted(file.name for file in (PACKAGE / "manifests").glob("rbac*.yaml"))
    assert sorted(rows("rights.md", "file")) == files


def test_links_lead_somewhere():
    readme = PACKAGE / "README.md"
    for page in [*pages(), readme]:
        for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", page.read_text()):
            there = (page.parent / target).resolve() if target else page
            assert there.exists(), (page.name, target)
            if anchor:
                heads = re.findall(r"^#+ (.*)", there.read_text(), re.M)
                assert anchor in {re.sub(r"[^a-z0-9 _-]", "", head.lower()).replace(" ", "-") for head in heads}, anchor
    for name in {page.name for page in pages()} - {"index.md"}:
        assert f"({name})" in (PAGES / "index.md").read_text()


def test_the_tests_that_the_coverage_names_exist():
    root = PAGES.parents[2]
    page = (root / "docs/internals/kubeflow-training-coverage.md").read_text()
    for name in re.findall(r"`((?:\w+/)?test_\w+\.py)`", page):
        assert (root / "tests/kubeflow_training" / name).is_file(), name
