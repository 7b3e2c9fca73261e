"""Sample data without a download: questions and answers about the Python that runs this.

The text is real: docstrings and signatures of the standard library, read from its sources without importing them, the
docstrings of a few harmless compiled modules, and the reference topics behind `help()`. The same Python gives the same
bytes. Parts 1 and 2 have no subject in common, so the second is new data for the same family.
"""

from __future__ import annotations

import ast
import csv
import gzip
import hashlib
import importlib
import inspect
import io
import json
import re
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from dropforge.errors import DataError

PARTS: Final = 2
_LONGEST: Final = 1_200

_SOURCES: Final = """
    abc argparse ast asyncio/base_events.py asyncio/events.py asyncio/locks.py asyncio/queues.py
    asyncio/runners.py asyncio/streams.py asyncio/tasks.py asyncio/timeouts.py base64 bdb bisect bz2 calendar
    cmd code codecs codeop collections/__init__.py collections/abc.py colorsys concurrent/futures/_base.py
    concurrent/futures/process.py concurrent/futures/thread.py configparser contextlib copy csv dataclasses
    datetime _pydatetime decimal _pydecimal difflib dis doctest email/_header_value_parser.py email/charset.py
    email/header.py email/headerregistry.py email/message.py email/utils.py enum filecmp fileinput fnmatch
    fractions ftplib functools getopt getpass gettext glob graphlib gzip heapq hmac html/__init__.py
    html/parser.py http/client.py http/cookiejar.py http/cookies.py http/server.py imaplib importlib/abc.py
    importlib/resources/abc.py importlib/util.py inspect io _pyio ipaddress json/__init__.py json/decoder.py
    json/encoder.py keyword linecache locale logging/__init__.py logging/config.py logging/handlers.py lzma
    mailbox mimetypes multiprocessing/managers.py multiprocessing/pool.py netrc numbers operator optparse os
    pathlib pathlib/__init__.py pdb pickle pickletools pkgutil platform plistlib poplib posixpath pprint profile
    pstats py_compile pyclbr pydoc queue quopri random re/__init__.py reprlib sched secrets selectors shelve
    shlex shutil signal smtplib socket socketserver sqlite3/dbapi2.py sqlite3/dump.py ssl stat statistics string
    string/__init__.py stringprep struct subprocess symtable sysconfig tarfile tempfile textwrap threading
    timeit token tokenize trace traceback tracemalloc types typing unittest/case.py unittest/loader.py
    unittest/mock.py unittest/suite.py urllib/parse.py urllib/request.py urllib/robotparser.py uuid
    venv/__init__.py warnings wave weakref webbrowser wsgiref/handlers.py wsgiref/headers.py
    wsgiref/simple_server.py wsgiref/util.py xml/dom/minidom.py xml/etree/ElementTree.py xml/sax/handler.py
    xmlrpc/client.py xmlrpc/server.py zipapp zipfile zipfile/__init__.py zipimport
"""
# Compiled into the interpreter or beside it, and importing them does nothing but define names.
_COMPILED: Final = """
    array atexit binascii builtins cmath collections errno functools gc hashlib io itertools marshal math
    operator select sys time unicodedata zlib
"""

_ABOUT_CALLABLE: Final = (
    "What does `{name}` do?",
    "Explain `{name}`.",
    "How do I use `{name}`?",
    "What is `{name}` for?",
    "I found `{name}` in some code. What does it do?",
    "Describe `{name}` in Python's `{module}` module.",
    "What should I know about `{name}`?",
    "When would I call `{name}`?",
)
_ABOUT_CLASS: Final = (
    "What is `{name}`?",
    "What does the class `{name}` represent?",
    "Describe the class `{name}`.",
    "When do I need `{name}` from the `{module}` module?",
)
_ABOUT_MODULE: Final = ("What is the module `{name}` for?", "What does Python's `{name}` module offer?")
_ABOUT_SIGNATURE: Final = (
    "Which arguments does `{name}` take?",
    "What is the signature of `{name}`?",
    "How do I call `{name}`?",
)
_ABOUT_METHODS: Final = ("Which methods does `{name}` have?", "What can I call on a `{name}`?")
_ABOUT_TOPIC: Final = (
    "What does the Python reference say about {topic}?",
    "Explain this part of the Python language: {topic}.",
    "Tell me about {topic} in Python.",
    "Quote the Python reference on {topic}.",
)


class Pair(NamedTuple):
    """A question with its answer; `subject` is what both are about."""

    subject: str
    question: str
    answer: str


def write_sample(folder: Path, *, part: int = 1) -> tuple[Path, ...]:
    """Write one part of the sample into `folder` and return its files.

    Three formats, to show that they mix: conversations as JSON lines, reference topics as gzipped JSON lines of
    prompt and completion, signatures as CSV. Every row carries its subject as `group`.

    :raises DataError: if there is no such part, or this Python comes without its sources.
    """
    if not 1 <= part <= PARTS:
        raise DataError(f"part {part} of the sample", f"there are parts 1 to {PARTS}", "Ask for one of them")
    folder.mkdir(parents=True, exist_ok=True)
    docs, signatures, topics = (_mine(pairs, part) for pairs in (_docs(), _signatures(), _topics()))
    if len(docs) + len(signatures) < 500:
        raise DataError(
            "sample data",
            "this Python comes without the sources of its standard library",
            "Use a Python with sources, or drop data of your own",
        )
    paths = (folder / "questions.jsonl", folder / "reference.jsonl.gz", folder / "signatures.csv")
    paths[0].write_bytes(_lines(_conversation(pair) for pair in docs))
    body = _lines(
        {"prompt": p.question, "completion": p.answer, "source": "reference", "group": p.subject} for p in topics
    )
    paths[1].write_bytes(gzip.compress(body, mtime=0))
    table = io.StringIO(newline="")
    writer = csv.writer(table)
    writer.writerow(("question", "answer", "source", "group"))
    writer.writerows((pair.question, pair.answer, "signatures", pair.subject) for pair in signatures)
    paths[2].write_bytes(table.getvalue().encode())
    return paths


def _conversation(pair: Pair) -> dict[str, object]:
    turns = [{"role": "user", "content": pair.question}, {"role": "assistant", "content": pair.answer}]
    return {"messages": turns, "source": "docstrings", "group": pair.subject}


def _lines(rows: Iterable[dict[str, object]]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode("utf-8", "replace")


def _mine(pairs: Iterable[Pair], part: int) -> list[Pair]:
    """The part's pairs: sides follow from the subject's name alone."""
    return [pair for pair in pairs if _pick(pair.subject, "part", PARTS) == part - 1]


def _pick(name: str, purpose: str, count: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"{purpose}\0{name}".encode(), digest_size=8).digest(), "big") % count


def _ask(templates: tuple[str, ...], name: str, **values: str) -> str:
    return templates[_pick(name, "question", len(templates))].format(name=name, **values)


class _Definition(NamedTuple):
    """A documented name: `kind` is module, class or callable."""

    module: str
    name: str
    kind: str
    doc: str
    signature: str = ""
    arguments: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()

    @property
    def subject(self) -> str:
        """A class and its methods are one subject."""
        return ".".join(self.name.split(".")[: self.module.count(".") + 2])


def _docs() -> Iterator[Pair]:
    seen: set[str] = set()
    templates = {"module": _ABOUT_MODULE, "class": _ABOUT_CLASS, "callable": _ABOUT_CALLABLE}
    for item in (*_definitions(), *_compiled()):
        answer = _trim(item.doc)
        # One text under many names (inherited methods, wrappers) teaches nothing new.
        if len(answer) < 20 or answer in seen:
            continue
        seen.add(answer)
        yield Pair(item.subject, _ask(templates[item.kind], item.name, module=item.module), answer)


def _signatures() -> Iterator[Pair]:
    for item in _definitions():
        if item.kind == "callable" and item.arguments:
            names = ", ".join(f"`{name}`" for name in item.arguments)
            answer = f"It is called as `{item.signature}`. The arguments are {names}."
            yield Pair(item.subject, _ask(_ABOUT_SIGNATURE, item.name), answer)
        elif item.kind == "class" and len(item.methods) > 1:
            names = ", ".join(f"`{name}`" for name in item.methods[:30])
            yield Pair(item.subject, _ask(_ABOUT_METHODS, item.name), f"`{item.name}` has the methods {names}.")


def _topics() -> Iterator[Pair]:
    """The reference behind `help()`, section by section."""
    from pydoc_data.topics import topics

    seen: set[str] = set()
    for topic in sorted(topics):
        blocks = re.split(r"\n{2,}", topics[topic].strip())
        title, number, held = topic, 0, list[str]()
        for block in [*blocks, ""]:
            lines = block.split("\n")
            heading = len(lines) == 2 and len(set(lines[1])) == 1 and lines[1][:1] in "*=-~^"
            # The empty block behind the last one closes it.
            if held and (heading or not block or sum(map(len, held)) + len(block) > _LONGEST):
                number += 1
                answer = "\n\n".join(held)
                about = title if number == 1 else f"{title}, part {number}"
                # Topics share sections; each belongs to the first topic that has it.
                if len(answer) > 40 and answer not in seen:
                    seen.add(answer)
                    yield Pair(f"topic {topic}", _ask(_ABOUT_TOPIC, about, topic=about), answer[: 2 * _LONGEST])
                held = []
            if heading:
                title, number = lines[0].strip(), 0
                title = title[:1].lower() + title[1:] if title[1:2].islower() else title
            elif block:
                held.append(block)


_CACHE: dict[str, tuple[_Definition, ...]] = {}


def _definitions() -> tuple[_Definition, ...]:
    """What the sources define, in the order of names; parsed once."""
    if "all" not in _CACHE:
        root = Path(sysconfig.get_paths()["stdlib"])
        found: list[_Definition] = []
        for entry in _SOURCES.split():
            path = root / (entry if entry.endswith(".py") else f"{entry}.py")
            if path.is_file():
                name = entry.removesuffix(".py").removesuffix("/__init__").replace("/", ".").lstrip("_")
                found += _parse(name.removeprefix("py") if name in {"pydatetime", "pydecimal", "pyio"} else name, path)
        _CACHE["all"] = tuple(sorted(found, key=lambda item: (item.name, item.doc)))
    return _CACHE["all"]


def _parse(module: str, path: Path) -> Iterator[_Definition]:
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, OSError):
        return
    yield _Definition(module, module, "module", ast.get_docstring(tree) or "")
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _function(module, module, node)
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            name = f"{module}.{node.name}"
            defs = [item for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)]
            public = tuple(dict.fromkeys(item.name for item in defs if not item.name.startswith("_")))
            yield _Definition(module, name, "class", ast.get_docstring(node) or "", methods=public)
            for item in defs:
                yield from _function(module, name, item)


def _function(module: str, owner: str, node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[_Definition]:
    if node.name.startswith("_"):
        return
    arguments = [item.arg for item in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    arguments = [name for name in arguments if name not in {"self", "cls"}]
    signature = f"{node.name}({_without_self(ast.unparse(node.args))})" if arguments else ""
    doc = ast.get_docstring(node) or ""
    yield _Definition(module, f"{owner}.{node.name}", "callable", doc, signature[:300], tuple(arguments))


def _without_self(arguments: str) -> str:
    return re.sub(r"^(?:self|cls)(?:, /)?(?:, |$)", "", arguments)


def _compiled() -> Iterator[_Definition]:
    """Docstrings of compiled modules: there is no source to read."""
    for module in _COMPILED.split():
        try:
            loaded = importlib.import_module(module)
        except ImportError:
            continue
        yield _Definition(module, module, "module", inspect.getdoc(loaded) or "")
        for name, value in sorted(vars(loaded).items()):
            if name.startswith("_") or not callable(value) or inspect.isfunction(value):
                continue
            if not isinstance(value, type):
                yield _Definition(module, f"{module}.{name}", "callable", value.__doc__ or "")
            elif value.__module__ in {module, "builtins"}:
                yield _Definition(module, f"{module}.{name}", "class", value.__doc__ or "")
                for part, member in sorted(vars(value).items()):
                    doc = getattr(member, "__doc__", None)
                    if not part.startswith("_") and isinstance(doc, str) and not inspect.isfunction(member):
                        yield _Definition(module, f"{module}.{name}.{part}", "callable", doc)


def _trim(doc: str) -> str:
    """The first paragraphs, up to a readable length."""
    held: list[str] = []
    for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(doc)):
        if held and sum(map(len, held)) + len(paragraph) > _LONGEST:
            break
        held.append(paragraph)
    return "\n\n".join(held)[: 2 * _LONGEST].strip()
