"""What users read is in plain English: error texts, logs, help, recipe keys' docs, pages, presets and values.

Docstrings that only developers read are no texts, and neither are identifiers, keys and what backticks or braces hold.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.usual_words import SHARED

ROOT: Final = Path(__file__).parents[1]
PACKAGES: Final = ("dropforge", "curation", "trainer", "plugins", "dags")
FILES: Final = ("dropforge", "plugins", "families", "helm-values", "images")
SUFFIXES: Final = frozenset({".yaml", ".example", ".env", ".html", ".json", ".sh"})

WORDS: Final = (
    *SHARED,
    (r"\bgangs?\b(?!.schedul)", "attempt, job or pods; gang scheduling stays"),
    (r"\b(name|the|all|these|those|of) letters\b|^letters?\b", "dead letters"),
    (r"\b(say|says) so\b", "what it says"),
    (r"\b(stands?|stood)\b", "is on, is in, means, appears"),
    (r"\b(nobody|whoever|somebody|anybody|everybody)\b", "no one, a user, everyone, or the passive"),
    (r"\b(lie|lies|lay|lain)\b", "is in, is at"),
    (r"\bsettl(e|es|ed|ing)\b", "deduplicate and split, resolve"),
    (r"\bline of models\b", "model family"),
    (r"\bversion that is left\b", "previous champion"),
    (r"\bperson's (yes|word)\b|\bperson is asked\b|\ba yes\b", "approval, awaiting approval"),
    (r"\bheaps?\b|\bat work\b(?! now)", "memory; running"),
    (r"\b(one|neither) of both\b", "one of them"),
    (
        r"\bkept whole\b|\bof an hour\b|\bhardly any\b|\bbeneath all\b|\bat the most\b",
        "complete, 15 minutes, few, at most",
    ),
    (r"\bshall\b|\bborne?\b", "should; tolerated"),
    (r"\bruns already\b", "is already running"),
)
FORBIDDEN: Final = tuple((re.compile(pattern, re.IGNORECASE), instead) for pattern, instead in WORDS)
ANY: Final = re.compile("|".join(pattern for pattern, _ in WORDS), re.IGNORECASE)

EXCEPTIONS: Final = {
    ("dropforge/samples.py", "Tell"): "a prompt of the sample data, whose rows are part of a digest",
}

CODE: Final = re.compile(r"`[^`]*`|\{\{.*?\}\}|:param [\w, ]+:")
QUOTED: Final = re.compile(r'"([^"\n]*)"')
TEMPLATE: Final = re.compile(r"`([^`$]*)`")
HOLE: Final = re.compile(r"\$\{[^{}`]*\}")
#: Besides operators, sensors, hooks and triggers: what the authors of DAGs give them.
PROVIDED: Final = ("plugins/kubeflow_training/jobs/spec.py", "plugins/kubeflow_training/jobs/budgets.py")
RUN_BY_NAME: Final = ("argparse.ArgumentParser(", "description=__doc__")


def test_texts_have_no_private_words() -> None:
    found = [
        f"{file}:{line}: {word!r}, write: {instead}"
        for file, line, text in texts()
        for word, instead in words(text)
        if (file, word) not in EXCEPTIONS
    ]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("Mend the rows", "Mend"),
        ("the gang is gone", "gang"),
        ("it lies in `lies/`", "lies"),
        ("nobody is told", "nobody"),
    ],
)
def test_a_private_word_is_found(text: str, word: str) -> None:
    assert word in [found for found, _ in words(text)]


@pytest.mark.parametrize(
    "text", ["Kueue does the gang scheduling", "see `dropforge letters` and `mend`", "two dead letters"]
)
def test_standard_terms_and_names_stay(text: str) -> None:
    assert not list(words(text))


def words(text: str) -> Iterator[tuple[str, str]]:
    """The private words of a text, each with what to write instead."""
    if not ANY.search(text):
        return
    plain = CODE.sub("``", text)
    for pattern, instead in FORBIDDEN:
        for match in pattern.finditer(plain):
            yield match[0], instead


def texts() -> Iterator[tuple[str, int, str]]:
    """All that users read: file, line and text."""
    commands = command_names()
    for path in sorted(path for name in PACKAGES for path in (ROOT / name).rglob("*.py")):
        file = path.relative_to(ROOT)
        for line, text in of_python(file, path.read_text(), commands):
            yield str(file), line, text
    for path in sorted(path for name in FILES for path in (ROOT / name).rglob("*") if path.suffix in SUFFIXES):
        for line, text in enumerate(path.read_text().splitlines(), 1):
            yield str(path.relative_to(ROOT)), line, text
    for path in sorted((ROOT / "plugins").rglob("*.js")):
        for line, text in of_script(path.read_text()):
            yield str(path.relative_to(ROOT)), line, text


def of_script(source: str) -> Iterator[tuple[int, str]]:
    """Strings and templates of JavaScript, the inner ones first, without what templates fill in."""
    for pattern in (QUOTED, TEMPLATE):
        while (plain := HOLE.sub("", source)) != source or pattern.search(source):
            source = plain
            if (found := pattern.search(source)) is not None:
                yield source.count("\n", 0, found.start()) + 1, found[1]
                source = source[: found.start()] + source[found.end() :]


def command_names() -> set[tuple[str, str]]:
    """Module and function of what `dropforge.cli.app` registers by its table."""
    tree = ast.parse((ROOT / "dropforge/cli/app.py").read_text())
    return {
        (node.value.id, node.attr)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }


def of_python(file: Path, source: str, commands: set[tuple[str, str]]) -> Iterator[tuple[int, str]]:
    """Strings with a space, and docstrings that become help or documentation."""
    tree = ast.parse(source)
    seen: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for place, statement in enumerate(node.body):
                if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Constant):
                    continue
                seen.add(id(statement.value))
                text = statement.value.value
                if isinstance(text, str) and is_read(file, source, node, place, commands):
                    yield statement.lineno, text
        elif isinstance(node, ast.JoinedStr):
            seen.update(map(id, node.values))
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
            if len(text.split()) > 1:
                yield node.lineno, text
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str) or id(node) in seen:
            continue
        if len(node.value.split()) > 1:
            yield node.lineno, node.value


def is_read(file: Path, source: str, owner: ast.AST, place: int, commands: set[tuple[str, str]]) -> bool:
    """Whether users read a docstring: help of a command, a recipe key, documentation of a DAG and its tasks."""
    if file.parts[0] == "dags" or "example_dags" in file.parts:
        return True
    if isinstance(owner, ast.Module):
        return place == 0 and all(word in source for word in RUN_BY_NAME)
    if isinstance(owner, ast.ClassDef):
        of_provider = file.match("plugins/kubeflow_training/*.py") or str(file) in PROVIDED
        return any(ast.unparse(base) == "Section" for base in owner.bases) or (
            of_provider and place == 0 and not owner.name.startswith("_")
        )
    decorators = getattr(owner, "decorator_list", [])
    return file.parts[:2] == ("dropforge", "cli") and (
        any(word in ast.unparse(decorator) for decorator in decorators for word in (".command", ".callback"))
        or (file.stem, getattr(owner, "name", "")) in commands
    )
