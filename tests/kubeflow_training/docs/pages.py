"""What the pages of docs/reference/kubeflow-training quote: excerpts of the examples, and tables of arguments.

`python -m tests.kubeflow_training.docs.pages` writes the excerpts again after an example has changed.
"""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path

import kubeflow_training

PACKAGE = Path(kubeflow_training.__file__).parent
PAGES = Path(__file__).parents[3] / "docs/reference/kubeflow-training"
_EXCERPT = re.compile(r"<!-- example: (\S+) (\S+) -->\n(?:```(?:python|yaml)\n.*?\n```\n)?", re.S)
_TABLE = re.compile(r"<!-- (arguments|options): (\S+) -->\n((?:\|.*\n)+)")
_MARK = re.compile(r"\s*# \[(START|END) \w+\]")


def pages() -> list[Path]:
    return sorted(PAGES.glob("*.md"))


def excerpt(file: str, name: str) -> str:
    """The lines of an example between `# [START name]` and `# [END name]`, moved to the left."""
    text = (PACKAGE / "example_dags" / file).read_text()
    start, end = f"# [START {name}]\n", f"# [END {name}]"
    assert text.count(start) == text.count(end) == 1, f"{file} has no excerpt {name}"
    lines = text.partition(start)[2].partition(end)[0].splitlines()
    kept = [line for line in lines if not _MARK.fullmatch(line)]
    return textwrap.dedent("\n".join(kept)).strip()


def with_excerpts(text: str) -> str:
    """The page with every excerpt as the example has it now."""

    def write(found: re.Match[str]) -> str:
        file, name = found[1], found[2]
        language = "yaml" if file.endswith(".yaml") else "python"
        return f"<!-- example: {file} {name} -->\n```{language}\n{excerpt(file, name)}\n```\n"

    return _EXCERPT.sub(write, text)


def quoted() -> set[tuple[str, str]]:
    """File and name of every excerpt that a page has."""
    return {(found[1], found[2]) for page in pages() for found in _EXCERPT.finditer(page.read_text())}


def tables(kind: str) -> dict[str, dict[str, str]]:
    """The tables that are marked as `kind`: what they are about, and name and default in each row."""
    found: dict[str, dict[str, str]] = {}
    for page in pages():
        for mark, about, table in _TABLE.findall(page.read_text()):
            if mark == kind:
                assert about not in found, f"{about} is documented twice"
                rows = [re.split(r"(?<!\\)\|", line.strip("| \n")) for line in table.splitlines()[2:]]
                found[about] = {row[0].strip().strip("`"): row[-1].strip() for row in rows}
                assert len(found[about]) == len(rows), f"a row of {about} stands there twice"
    return found


class Signature:
    """Parameters with their defaults as source text (None for none), and the docstring that should name them."""

    def __init__(self, about: str) -> None:
        parts = about.split(".")
        module = next(
            path
            for count in range(len(parts), 0, -1)
            if (path := PACKAGE.joinpath(*parts[:count]).with_suffix(".py")).is_file()
        )
        tree: ast.AST = ast.parse(module.read_text())
        self.docstrings = ""
        for name in parts[len(module.relative_to(PACKAGE).parts) :]:
            tree = next(
                node
                for node in ast.iter_child_nodes(tree)
                if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name
            )
        assert isinstance(tree, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        self.docstrings = ast.get_docstring(tree) or ""
        self.parameters = self._of_class(tree) if isinstance(tree, ast.ClassDef) else self._of_function(tree)

    def _of_class(self, tree: ast.ClassDef) -> dict[str, str | None]:
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and node.name == "__init__":
                return self._of_function(node)
        return {
            node.target.id: ast.unparse(node.value) if node.value else None
            for node in tree.body
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        }

    @staticmethod
    def _of_function(tree: ast.FunctionDef | ast.AsyncFunctionDef) -> dict[str, str | None]:
        plain = [*tree.args.posonlyargs, *tree.args.args]
        found: dict[str, str | None] = {item.arg: None for item in plain}
        found |= {item.arg: None for item in tree.args.kwonlyargs}
        for item, value in zip(reversed(plain), reversed(tree.args.defaults), strict=False):
            found[item.arg] = ast.unparse(value)
        for item, default in zip(tree.args.kwonlyargs, tree.args.kw_defaults, strict=True):
            found[item.arg] = ast.unparse(default) if default else None
        found.pop("self", None)
        return found

    @property
    def documented(self) -> set[str]:
        """The parameters that the docstring names, alone or several at once."""
        lists = re.findall(r":param ([\w, ]+):", self.docstrings)
        return {name.strip() for names in lists for name in names.split(",")}


def main() -> None:
    for page in pages():
        page.write_text(with_excerpts(page.read_text()))


if __name__ == "__main__":
    main()
