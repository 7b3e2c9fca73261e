"""A Dockerfile as the tests look at it: instructions, one after another, and the stages they belong to."""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
IMAGES = REPOSITORY / "images"
NAMES = sorted(path.parent.name for path in IMAGES.glob("*/Dockerfile"))
VERSION: str = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"]


@dataclass(frozen=True)
class Instruction:
    word: str
    rest: str


class Dockerfile:
    """What `images/NAME/Dockerfile` says."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.path = IMAGES / name / "Dockerfile"
        self.text = self.path.read_text()
        joined = re.sub(r"\\\n\s*", "", re.sub(r"^\s*#.*\n", "", self.text, flags=re.MULTILINE))
        lines = [line.partition(" ") for line in joined.splitlines() if line.strip()]
        self.instructions = [Instruction(word.upper(), rest.strip()) for word, _, rest in lines]

    def all(self, word: str) -> list[str]:
        return [item.rest for item in self.instructions if item.word == word]

    @property
    def last_stage(self) -> list[Instruction]:
        starts = [index for index, item in enumerate(self.instructions) if item.word == "FROM"]
        return self.instructions[starts[-1] :]

    def last(self, word: str) -> str:
        """What holds in the image itself."""
        return [item.rest for item in self.last_stage if item.word == word][-1]

    @property
    def arguments(self) -> dict[str, str]:
        """Names of build arguments and what they are if nobody says otherwise."""
        return {name: value for rest in self.all("ARG") for name, value in re.findall(r"(\w+)=?(\S*)", rest)}

    @property
    def variables(self) -> list[str]:
        return [name for rest in self.all("ENV") for name in re.findall(r"(\w+)=", rest)]

    @property
    def labels(self) -> dict[str, str]:
        return dict(re.findall(r'([\w.]+)="([^"]*)"', " ".join(self.all("LABEL"))))

    @property
    def entrypoint(self) -> list[str]:
        found: list[str] = json.loads(self.last("ENTRYPOINT"))
        return found
