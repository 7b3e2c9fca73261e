"""Checkpoints: complete only with their manifest, checked byte for byte when they are read.

::

    checkpoints/step-N/rank-R.safetensors  what rank R writes of weights, moments and its generators
    checkpoints/step-N/progress.json       counters and evaluations
    checkpoints/step-N/manifest.json       sizes, SHA-256, world size, plan and recipe; written last
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any, BinaryIO, Final, TypeVar

import torch

from dropforge import aside
from dropforge.errors import DropforgeError, RecipeError
from dropforge.json_objects import MOST_LISTED, MOST_MANIFEST, UNREADABLE, parse_object, read_object, typed
from dropforge.store import MissingObjectError, Store, TooLargeError, out_of_reach, read_bounded
from trainer.state.blocks import DTYPES, Block, Staging, join, own_blocks, read_blocks, whole
from trainer.state.compare import changes, free
from trainer.state.retention import which_go

SCHEMA: Final = 2
MANIFEST: Final = "manifest.json"
PROGRESS: Final = "progress.json"
_STEP: Final = re.compile(r"checkpoints/step-(\d+)/(.+)")
_TRIES: Final = 3  # of reading what cannot be reached
_PIECE: Final = 1 << 24  # bytes that are read and hashed at once
_MOST_HEADER: Final = 100_000_000  # bytes, as safetensors itself has it
_WRITTEN: Final = ("best/", "checkpoints/", "model/", "plan/")  # folders of large files
WEIGHT, MOMENT, RANDOM = "weights/", "moments/", "random/"

T = TypeVar("T")
File = Mapping[str, Any]  # `bytes` and `sha256` of a file


class StorageError(Exception):
    """A checkpoint cannot be read now: nothing is known of its state, so it is neither good nor broken."""


class TakenError(DropforgeError):
    """Another process wrote the same checkpoint meanwhile: what is there is its."""


@dataclass(frozen=True)
class Snapshot:
    """The state between two steps.

    :param step: optimizer steps done.
    :param generators: for each rank its random state by generator.
    :param progress: plain counters.
    """

    step: int
    weights: Mapping[str, torch.Tensor]
    moments: Mapping[str, torch.Tensor]
    generators: list[Mapping[str, torch.Tensor]]
    progress: Mapping[str, Any]

    def blocks(self, rank: int, world: int, node: tuple[int, int] | None = None) -> dict[str, Block]:
        """What a rank writes of it; of `generators` only the rank's own are looked at.

        :param node: rank within the node and number of ranks there, if the node is to have all that its ranks hold.
        """
        state = {f"{WEIGHT}{name}": tensor for name, tensor in self.weights.items()}
        state |= {f"{MOMENT}{name}": tensor for name, tensor in self.moments.items()}
        own = {f"{RANDOM}{rank}:{name}": whole(tensor) for name, tensor in self.generators[rank].items()}
        return own_blocks(state, rank, world, node) | own


@dataclass(frozen=True)
class Seal:
    """The manifest of a checkpoint.

    :param world: ranks that wrote it. :param plan: digest that a resume must share.
    :param recipe: dotted keys and values, for the comparison with those of a resume.
    :param digest: SHA-256 over the files' digests. :param check: SHA-256 over all other fields.
    """

    run: str
    step: int
    world: int
    plan: str
    recipe: Mapping[str, str]
    files: Mapping[str, File]
    digest: str
    eval_loss: float | None = None
    tokens: int = 0
    at: str = ""
    schema: int = SCHEMA
    check: str = ""

    @property
    def bytes(self) -> int:
        return sum(int(file["bytes"]) for file in self.files.values())


@dataclass
class Checkpoints:
    """The checkpoints of one run.

    :param recipe: what a resume must share, by dotted key. :param say: where notices for people go.
    :param pause: seconds before a read is tried again; twice as long the next time.
    """

    store: Store
    run: str
    plan: str
    recipe: Mapping[str, str]
    say: Callable[[str], None] = print
    bad: set[int] = field(default_factory=set)
    pause: float = 1.0

    def write(self, step: int, name: str, data: bytes | memoryview) -> File:
        """Write one file; with the others it becomes a checkpoint once `seal` has returned, and not before."""
        self.store.put(_prefix(step) + name, data)
        return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}

    def unseal(self, step: int) -> None:
        """Take away the manifest of an earlier attempt: no checkpoint while its files are being replaced."""
        if self.store.stat(f"{_prefix(step)}{MANIFEST}") is not None:
            self.store.delete(f"{_prefix(step)}{MANIFEST}")

    def make_seal(
        self, step: int, world: int, files: Mapping[str, File], eval_loss: float | None = None, tokens: int = 0
    ) -> Seal:
        """The manifest of files that were written."""
        made = Seal(
            run=self.run,
            step=step,
            world=world,
            plan=self.plan,
            recipe=self.recipe,
            files=dict(sorted(files.items())),
            digest=_digest(files),
            eval_loss=eval_loss,
            tokens=tokens,
            at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        )
        return Seal(**{**asdict(made), "check": _check(asdict(made))})

    def seal(
        self, step: int, world: int, files: Mapping[str, File], eval_loss: float | None = None, tokens: int = 0
    ) -> Seal:
        """Write the manifest, which makes the files a checkpoint.

        :raises TakenError: if another process wrote one meanwhile.
        """
        seal = self.make_seal(step, world, files, eval_loss, tokens)
        if not self.store.put_if_absent(f"{_prefix(step)}{MANIFEST}", _body(seal)):
            raise TakenError(
                f"checkpoint {self.store.uri}/{_prefix(step)}",
                "another process wrote it at the same time",
                "Let only one job train a run; stop the other",
            )
        self.bad.discard(step)
        return seal

    def place_seal(self, seal: Seal) -> None:
        """Write a manifest that others may have written already, with the same content."""
        self.store.put(f"{_prefix(seal.step)}{MANIFEST}", _body(seal))
        self.bad.discard(seal.step)

    def save(self, snapshot: Snapshot, eval_loss: float | None = None) -> Seal:
        """Write a whole checkpoint of one process, and return when it exists."""
        self.unseal(snapshot.step)
        files = {
            rank_file(rank): self.write(
                snapshot.step, rank_file(rank), Staging().fill(snapshot.blocks(rank, len(snapshot.generators)))
            )
            for rank in range(len(snapshot.generators))
        }
        files[PROGRESS] = self.write(snapshot.step, PROGRESS, json.dumps(snapshot.progress).encode())
        return self.seal(snapshot.step, len(snapshot.generators), files, eval_loss)

    def seals(self) -> list[Seal]:
        """Readable manifests of complete checkpoints, oldest first; the others are passed over with a notice.

        :raises StorageError: if one cannot be reached.
        """
        found = (self._manifest(step) for step, names in sorted(self._listing().items()) if MANIFEST in names)
        return [seal for seal in found if isinstance(seal, Seal)]

    def candidates(self) -> Iterator[Seal]:
        """Checkpoints to resume from, the newest first; what is none, or was set aside by a person, is passed over with
        a notice. Say `pass_over` of one that turns out to be broken, and ask for the next.

        :raises DropforgeError: if it is of another plan, recipe or layout; the recipes' differences are named.
        :raises StorageError: if it cannot be reached: it may be good, so an older one must not take its place.
        """
        left = self._try(aside.KEY, lambda: aside.known(self.store))
        for step, names in sorted(self._listing().items(), reverse=True):
            if MANIFEST not in names:
                self.say(f"checkpoint step-{step} was never finished; it is skipped")
                continue
            seal = self._manifest(step)
            if isinstance(seal, Seal) and seal.check in left:
                self.say(f"checkpoint step-{step} was set aside by a user; it is skipped")
                self.bad.add(step)  # retention counts it no more, and removes it once the training has come past it
            elif isinstance(seal, Seal):
                self.check_same(seal)
                yield seal
            elif seal is not None:
                raise DropforgeError(
                    f"checkpoint {self.store.uri}/{_prefix(step)}",
                    f"it has layout {seal}, and this trainer reads layout {SCHEMA} only",
                    "Continue with the trainer that wrote it, or start a new run",
                )

    def check_same(self, seal: Seal) -> None:
        """:raises DropforgeError: if a checkpoint is of another plan or recipe; the differences are named."""
        thing = f"checkpoint {self.store.uri}/{_prefix(seal.step)}"
        found = changes(seal.recipe, self.recipe)
        unsafe = [change for change in found if not change.safe]
        if unsafe:
            kept = [change for change in found if change.safe]
            rows = "".join([f"\n  {change}" for change in unsafe] + [f"\n  {change} (may change)" for change in kept])
            raise RecipeError(
                thing,
                "it is of another recipe",
                f"Free to change are {', '.join(free(found))}. Give back the others, or start a new run. What differs, "
                f"its value -> this run's:{rows}",
            )
        if seal.plan != self.plan:
            raise DropforgeError(
                thing,
                f"its plan {seal.plan[:12]} is not this run's {self.plan[:12]}, so its step counts other data",
                "Start a new run, or give back "
                + "; ".join(["the dataset and the image of this one", *map(str, found)]),
            )
        if found:
            self.say(f"changed since checkpoint step-{seal.step}, safely: {', '.join(map(str, found))}")

    def _manifest(self, step: int) -> Seal | int | None:
        """The manifest, the number of its layout if that is another one, or None with a notice if it is broken."""
        try:
            key = f"{_prefix(step)}{MANIFEST}"
            values = self._try(key, lambda: read_object(self.store, key, most=MOST_MANIFEST))
            schema = values["schema"]
            if isinstance(schema, int) and schema != SCHEMA:
                return schema
            seal = typed(Seal(**values))
            if seal.step != step or _digest(seal.files) != seal.digest or _check(values) != seal.check:
                raise ValueError("it contradicts itself")
        except UNREADABLE as error:
            self.pass_over(step, f"its manifest cannot be read ({error})")
            return None
        return seal

    def read(self, seal: Seal) -> Snapshot:
        """The state of a checkpoint. :raises DropforgeError, ValueError, KeyError: if it is broken."""
        parts = []
        progress: dict[str, Any] = {}
        for name in seal.files:
            data = self.file(seal, name)
            if name == PROGRESS:
                progress = parse_object(data, name)
            else:
                parts.append(read_blocks(data))
        state = join(parts)
        generators: list[dict[str, torch.Tensor]] = [{} for _ in range(seal.world)]
        for key, tensor in _below(state, RANDOM).items():
            rank, _, name = key.partition(":")
            generators[int(rank)][name] = tensor
        return Snapshot(seal.step, _below(state, WEIGHT), _below(state, MOMENT), list(generators), progress)

    def file(self, seal: Seal, name: str) -> bytes:
        """One file of a checkpoint. :raises DropforgeError: if its bytes are not those that were sealed."""
        key, facts = _prefix(seal.step) + name, seal.files[name]
        most = min(facts["bytes"], MOST_LISTED) if name == PROGRESS else facts["bytes"]
        with suppress(TooLargeError):
            data = self._try(key, lambda: read_bounded(self.store, key, most))
            if len(data) == facts["bytes"] and hashlib.sha256(data).hexdigest() == facts["sha256"]:
                return data
        raise DropforgeError(name, "its bytes are not those that were written", "Nothing to do")

    def visit(
        self,
        seal: Seal,
        name: str,
        header: Mapping[str, Any],
        wanted: Collection[str],
        take: Callable[[str, torch.Tensor], None],
    ) -> None:
        """Hand over some tensors of a rank's file as they pass by; no more of it than one tensor is ever in memory.

        What was handed over may be used only after this has returned. It may come twice, if a read had to be repeated.

        :param header: what `header` said of the file. :param take: gets a name and values that it must copy.
        :raises DropforgeError: if its bytes are not those that were sealed, or the header is another one.
        """
        key, facts = _prefix(seal.step) + name, seal.files[name]

        def go() -> bool:
            with self.store.open(key) as stream:
                source = _Hashed(stream)
                size = int.from_bytes(source.read(8), "little")
                if size > min(facts["bytes"], _MOST_HEADER) or parse_object(bytes(source.read(size)), key) != header:
                    return False
                entries = ((entry, title) for title, entry in header.items() if title != "__metadata__")
                for entry, title in sorted(entries, key=lambda item: item[0]["data_offsets"]):
                    begin, end = entry["data_offsets"]
                    if end > facts["bytes"]:
                        return False
                    if title not in wanted:
                        source.skip(end - begin)
                        continue
                    kind, shape = DTYPES[entry["dtype"]], entry["shape"]
                    if math.prod(shape) * kind.itemsize != end - begin:
                        return False
                    data = source.read(end - begin)
                    values = torch.frombuffer(data, dtype=kind) if data else torch.empty(0, dtype=kind)
                    take(title, values.view(shape))
                source.finish(facts)
            return source.matches(facts)

        try:
            good = self._try(key, go)
        except (ValueError, KeyError, TypeError, AttributeError):
            good = False  # whatever the bytes led to: they were not those that were sealed, or were sealed like that
        if not good:
            raise DropforgeError(name, "its bytes are not those that were written", "Nothing to do")

    def holds(self, seal: Seal, name: str) -> bool:
        """Whether a file of the right size is there; its bytes are not looked at."""
        try:
            found = self.store.sizes(_prefix(seal.step) + name)
        except Exception:  # stores raise many kinds
            return False
        return bool(found.get(_prefix(seal.step) + name) == seal.files[name]["bytes"])

    def verify(self, seal: Seal, name: str) -> None:
        """Look at every byte of a file. :raises DropforgeError: if they are not those that were sealed."""

        def go() -> bool:
            with self.store.open(_prefix(seal.step) + name) as stream:
                source = _Hashed(stream)
                source.finish(facts)
            return source.matches(facts)

        facts = seal.files[name]
        if not self._try(_prefix(seal.step) + name, go):
            raise DropforgeError(name, "its bytes are not those that were written", "Nothing to do")

    def header(self, seal: Seal, name: str) -> dict[str, Any]:
        """What a rank's file says of its tensors, unchecked. :raises ValueError: if it says nothing."""

        key = _prefix(seal.step) + name

        def begin() -> bytes:
            with self.store.open(key) as stream:
                size = int.from_bytes(stream.read(8), "little")
                if size > _MOST_HEADER:
                    raise ValueError(f"the header of {name} has {size} bytes")
                return stream.read(size)

        found = parse_object(self._try(key, begin), key)
        if "__metadata__" not in found:
            raise ValueError(f"{name} is no file of a state")
        return found

    def _try(self, key: str, read: Callable[[], T]) -> T:
        last: BaseException | None = None
        for attempt in range(_TRIES):
            if attempt:
                time.sleep(self.pause * 2 ** (attempt - 1))
            try:
                return read()
            except MissingObjectError:
                raise
            except Exception as error:  # stores raise many kinds
                if not out_of_reach(error):
                    raise
                last = error
        raise StorageError(
            f"{self.store.uri}/{key} cannot be read now ({last}). Fix the storage and try again; to resume from an "
            f"older checkpoint, remove {key.rpartition('/')[0]}/"
        ) from last

    def pass_over(self, step: int, cause: str) -> None:
        """Count a checkpoint as broken, and say so once."""
        if step not in self.bad:  # once is enough
            self.say(f"checkpoint step-{step} is broken ({cause}); going back to an older one")
        self.bad.add(step)

    def prune(self, keep: int, step: int, best: int = 0) -> list[int]:
        """Delete all but the `keep` newest and the `best` best checkpoints up to `step`; steps that were deleted.

        What lacks bytes is not kept, and nothing is deleted if that is the newest. What was never finished, or is
        broken, goes as well, once a newer one is whole.
        """
        listing = {at: names for at, names in sorted(self._listing().items()) if at <= step}
        seals = [self._manifest(at) for at, names in listing.items() if MANIFEST in names]
        present = [seal for seal in seals if isinstance(seal, Seal)]
        for seal in present:
            sizes = listing[seal.step]
            lacking = [name for name, facts in seal.files.items() if sizes.get(name) != facts["bytes"]]
            if lacking:
                self.pass_over(seal.step, f"{lacking[0]} lacks bytes")
        good = [seal for seal in present if seal.step not in self.bad]
        if not good or good[-1].step != (present[-1].step if present else None):
            return []
        gone = which_go(good, keep, best)
        known = {seal.step for seal in good}
        for at in listing:
            if at in gone or (at < good[-1].step and at not in known):
                self.discard(at)
        return gone

    def discard(self, step: int) -> None:
        """Delete all that is there of a step; the manifest first, because half of a checkpoint is none."""
        self.store.delete(f"{_prefix(step)}{MANIFEST}")
        self.store.delete_all(_prefix(step))

    def sweep(self) -> None:
        """Delete what killed attempts left unfinished; only before a rank of this attempt writes."""
        for step, names in self._listing().items():
            if MANIFEST not in names:
                self.discard(step)
        for folder in _WRITTEN:
            with suppress(Exception):  # they only take room
                self.store.tidy(folder)

    def steps(self) -> list[int]:
        """Steps of which anything is there, in order."""
        return sorted(self._listing())

    def _listing(self) -> dict[int, dict[str, int]]:
        found: dict[int, dict[str, int]] = {}
        for key, size in self.store.sizes("checkpoints/").items():
            match = _STEP.fullmatch(key)
            if match:
                found.setdefault(int(match[1]), {})[match[2]] = size
        return found


class _Hashed:
    """A stream that is hashed as it is read."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.digest = hashlib.sha256()
        self.count = 0

    def read(self, size: int) -> bytearray:
        """Exactly `size` bytes. :raises ValueError: if there are fewer."""
        found = bytearray()  # grows with what is there: a file may say that it holds more than any memory
        while len(found) < size:
            piece = self._stream.read(min(_PIECE, size - len(found)))
            if not piece:
                raise ValueError("it ends too early")
            found += piece
            self._count(piece)
        return found

    def skip(self, size: int) -> None:
        """Pass over `size` bytes, or over all that are left if there are fewer."""
        while size > 0 and (piece := self._stream.read(min(_PIECE, size))):
            size -= len(piece)
            self._count(piece)

    def finish(self, facts: File) -> None:
        """Pass over what is left of what was sealed, and one byte beyond it if there are more."""
        self.skip(facts["bytes"] + 1 - self.count)

    def matches(self, facts: File) -> bool:
        """Whether what was read are the bytes that were sealed, all of them."""
        return (self.count, self.digest.hexdigest()) == (facts["bytes"], facts["sha256"])

    def _count(self, piece: bytes) -> None:
        self.digest.update(piece)
        self.count += len(piece)


def rank_file(rank: int) -> str:
    """Name of a rank's file."""
    return f"rank-{rank}.safetensors"


def _below(state: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}


def _digest(files: Mapping[str, File]) -> str:
    lines = sorted(f"{name} {facts['sha256']} {facts['bytes']}" for name, facts in files.items())
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _check(values: Mapping[str, Any]) -> str:
    content = json.dumps({key: value for key, value in values.items() if key != "check"}, sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


def _body(seal: Seal) -> bytes:
    return json.dumps(asdict(seal), indent=1, sort_keys=True).encode()


def _prefix(step: int) -> str:
    return f"checkpoints/step-{step}/"
