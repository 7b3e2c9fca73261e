"""From a drop to a dataset version: fetch, read, settle, write, publish.

Nothing is visible before the manifest, which is written last by a conditional PUT. Whoever comes second with the same
data takes the first one's manifest. A run that was cut off leaves objects that no manifest names, and the next one
writes the same objects again.
"""

from __future__ import annotations

import errno
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import pyarrow.parquet as pq

from curation import exchange
from curation.card import render, summary
from curation.decontaminate import FOUND
from curation.engines.choice import choose, opened
from curation.engines.duck import Memory
from curation.engines.tables import Engine, Tables
from curation.eval_sets import prepare
from curation.exchange import KEYS, LEDGER, QUARANTINE, SHARDS
from curation.gate import check_names
from curation.identity import exact_name
from curation.kernel import Report, Rules, Task
from curation.limit import first, limited
from curation.own import prepare_own
from curation.plan import make_rules, readable, tasks
from curation.reasons import filtered, mend, quarantined
from curation.sample import Told, choose_sample
from curation.shards import LocalShard, Size, file_sha256, write_ledger, write_quarantine, write_shards
from curation.statistics import measure
from curation.streams import DEFAULT_LIMITS, Limits
from curation.verify import verify
from dropforge import dataset, layout
from dropforge.dataset import SPLITS, Manifest, Shard
from dropforge.drop import Drop, DropFile
from dropforge.errors import DataError, DropforgeError
from dropforge.recipe import Recipe
from dropforge.store import Store

Progress = Callable[[str, int, int, int], None]

#: Items of evaluation sets on the card.
_SHOWN: Final = 12
_SIDES: Final = {"train": 0, "eval": 1}


def curate(
    store: Store,
    drop: Drop,
    recipe: Recipe,
    *,
    workdir: Path,
    progress: Progress | None = None,
    limits: Limits = DEFAULT_LIMITS,
    memory: Memory | None = None,
    engine: Engine | None = None,
    say: Callable[[str], None] | None = None,
    sample: int | None = None,
) -> Manifest:
    """Make the drop's dataset version, or find it made.

    The digest is the same for any engine, any number of workers and any order of files.

    :param store: where the drop lies and the dataset goes.
    :param workdir: local folder for the drop's files and everything unfinished; about three times the drop's size
        (decompressed), with near duplicates by words about five times, by characters about twelve. A second try in
        the same folder goes on where the first one ended.
    :param progress: called with (stage, done, total, input rows read); stages are fetch and read, in bytes, settle,
        write and publish. `Pace` is one.
    :param memory: what the embedded engine may hold.
    :param engine: one that runs already; else that of the recipe is started and ended.
    :param say: told in a sentence which engine is taken, and why.
    :param sample: look at about so many rows instead of all, for a version that nobody trains on.
    :raises DataError: if no row can be used, or an object is not what the drop recorded.
    :raises DropforgeError: if the engine cannot run here, the disk is full, or the ledger does not add up.
    """
    tell = progress or _silent
    running: AbstractContextManager[Engine]
    if engine is None:
        choice = choose(recipe.curation.engine, sum(file.size for file in drop.data_files))
        if say is not None:
            say(f"Curation is {choice.engine}: {choice.why}")
        running = opened(choice, recipe.curation, workdir / "engine", memory)
    else:
        running = nullcontext(engine)
    try:
        return _curate(store, drop, recipe, workdir, tell, limits, running, sample)
    except OSError as error:
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            raise DropforgeError(
                f"work folder {workdir}", "the disk is full", "Free space, or choose another folder"
            ) from error
        raise


def _silent(stage: str, done: int, total: int, rows: int) -> None:
    """Progress that nobody watches."""


def _curate(
    store: Store,
    drop: Drop,
    recipe: Recipe,
    workdir: Path,
    tell: Progress,
    limits: Limits,
    running: AbstractContextManager[Engine],
    wanted: int | None,
) -> Manifest:
    check_names(recipe)
    rules, sets = make_rules(recipe), None
    if (asked := recipe.curation.decontaminate) is not None:
        rules, sets = prepare(store, asked, rules, workdir / "eval-sets", limits)
    own, unpacked = prepare_own(recipe, workdir / "own", store)
    rules = replace(rules, own=own)
    files, hidden = readable(drop)
    names = [file.key for file in files]
    whole = len(files)
    fetched: Callable[[int, int], None] = lambda done, total: tell("fetch", done, total, 0)  # noqa: E731
    paths, most = first(store, drop, files, rules, workdir / "files", fetched, limits)
    files, names = files[: len(paths)], names[: len(paths)]
    held = list(zip(names, paths, strict=True))
    sample = choose_sample(wanted, held, rules.max_row_bytes, rules.encoding) if wanted else None
    index = sets.path if sets else None
    how = partial(tasks, limits=limits, index=index, sample=sample, most=most, own=unpacked)
    work = list(how(drop, files, paths, rules, workdir / "parts"))
    with running as engine:
        reports = _read(engine, work, tell)
        if recipe.curation.steps == "none":
            verify(reports)
        if not sum(report.rows for _, report in reports):
            raise _nothing(drop, names, work)
        tell("settle", 0, 1, 0)
        with engine.tables(workdir / "tables") as tables:
            exchange.load(tables, work, rules)
            exchange.settle(tables, rules)
            counts = exchange.counts(tables)
            facts = {**rules.facts(), "exact": _exact(tables), **({"sample": wanted} if wanted else {})}
            digest = dataset.digest({split: _keys(tables, split) for split in SPLITS}, counts, facts)
            tell("settle", 1, 1, 0)
            found = find(store, drop.family, digest)
            if found is not None:
                return found
            out = workdir / "out"
            shards = _write(tables, out, names, counts, tell)
            _balance(tables, out / "ledger.parquet", names, reports, counts, shards)
            if dataset.digest({split: _shard_keys(shards[split]) for split in SPLITS}, counts, facts) != digest:
                raise DropforgeError(
                    "curation's shards", "they are not what the digest says", "This is a bug; keep the drop"
                )
            touched = {name: sum(getattr(report, name) for _, report in reports) for name in touchable(rules)}
            counted = _stage_counts(reports)
            touched |= {name: count for name, count in counted.items() if not name.startswith((FOUND, "sample_"))}
            statistics = measure(tables, names, touched)

    read = _records(reports, len(files))
    inputs = tuple(_input(file, rows) for file, rows in zip(files, read, strict=True))
    manifest = Manifest(
        family=drop.family,
        digest=digest,
        counts=counts,
        rules=facts,
        shards=tuple(
            Shard(split, layout.shard_key(drop.family, shard.sha256), shard.sha256, shard.rows, shard.bytes)
            for split in SPLITS
            for shard in shards[split]
        ),
        inputs=inputs,
    )
    # Of a file without a row in the sample nothing is known.
    warnings = [*limited(rules, len(files), whole)]
    warnings += _warnings(work, reports, rules, files, hidden, [1] * len(files) if sample else read)
    if (override := recipe.curation.gate.override) is not None:
        warnings.insert(0, f"The recipe lets this version pass the gate whatever its rules find: {override}")
    told = Told.of(counted) if sample else None
    if told is not None:
        warnings.insert(0, told.line())
    card = summary(drop, manifest, statistics, warnings)
    if told is not None:
        card["sample"] = asdict(told)
    if sets is not None:
        found_items = sets.report(counted, out / "contamination.jsonl")
        card["evaluation_sets"] = {"sets": sets.summary(counted), "found": found_items[:_SHOWN]}
    (out / "card.json").write_text(json.dumps(card, indent=1, sort_keys=True, ensure_ascii=False), encoding="utf-8")
    (out / "card.html").write_text(render(card), encoding="utf-8")
    return _publish(store, drop, manifest, [shard for split in SPLITS for shard in shards[split]], out, tell)


def touchable(rules: Rules) -> tuple[str, ...]:
    """The kernel's counters that the card shows."""
    return ("blank", "neutralised", "invisible", *(["short"] if rules.near else []), *(["masked"] if rules.pii else []))


def find(store: Store, family: str, digest: str) -> Manifest | None:
    """The published dataset version with this digest, if there is one."""
    key = layout.manifest_key(family, digest)
    return Manifest.from_json(store.get(key)) if store.stat(key) is not None else None


def _read(engine: Engine, work: Sequence[Task], tell: Progress) -> list[tuple[Task, Report]]:
    sizes = {task.id: _size(task) for task in work}
    total, done, rows = sum(sizes.values()), 0, 0
    reports = []
    tell("read", 0, total, 0)
    for task, report in engine.run(work, total):
        reports.append((task, report))
        done += sizes[task.id]
        rows += report.records
        tell("read", done, total, rows)
    return reports


def _size(task: Task) -> int:
    split = task.split
    if split.end is not None and split.format.kind == "jsonl":
        return split.end - split.start
    return split.path.stat().st_size


def _records(reports: Sequence[tuple[Task, Report]], files: int) -> list[int]:
    """Input rows per file, as the readers counted them."""
    read = [0] * files
    for task, report in reports:
        read[task.file] += report.records
    return read


def _stage_counts(reports: Sequence[tuple[Task, Report]]) -> dict[str, int]:
    """What the stages counted, over all splits."""
    counts: Counter[str] = Counter()
    for _, report in reports:
        counts.update(report.counts)
    return dict(sorted(counts.items()))


def _keys(tables: Tables, split: str) -> Iterator[bytes]:
    """The split's content keys in order, many at a time: the digest sees one stream of bytes."""
    for batch in tables.batches(KEYS.format(side=_SIDES[split]), 65_536):
        yield b"".join(batch.column("key").to_pylist())


def _shard_keys(shards: Sequence[LocalShard]) -> Iterator[bytes]:
    """The keys as they were written: the digest must hold for what a reader will find."""
    for shard in shards:
        for batch in pq.ParquetFile(shard.path).iter_batches(65_536, columns=["key"]):
            yield b"".join(batch.column("key").to_pylist())


def _exact(tables: Tables) -> str:
    """What the kept rows are byte for byte. Keys fold white space; a changed indentation or label is new data."""
    state = hashlib.sha256()
    for split in SPLITS:
        state.update(split.encode())
        for batch in tables.batches(KEYS.format(side=_SIDES[split]), 65_536):
            # The rest of the rank is the row's place, which is no part of what it is.
            state.update(b"".join(map(exact_name, batch.column("rank").to_pylist())))
    return state.hexdigest()


def _write(
    tables: Tables, out: Path, names: Sequence[str], counts: Mapping[str, int], tell: Progress
) -> dict[str, list[LocalShard]]:
    out.mkdir(parents=True, exist_ok=True)
    total, done = counts["train"] + counts["eval"], 0

    def more(rows: int) -> None:
        nonlocal done
        done += rows
        tell("write", done, total, 0)

    tell("write", 0, total, 0)
    shards = {
        split: write_shards(tables.batches(SHARDS.format(side=_SIDES[split]), 1024), out / split, Size(), more)
        for split in SPLITS
    }
    write_ledger(tables.batches(LEDGER, 65_536), out / "ledger.parquet", names)
    write_quarantine(tables.batches(QUARANTINE), out / "quarantine.jsonl", names)
    return shards


def _balance(
    tables: Tables,
    ledger: Path,
    names: Sequence[str],
    reports: Sequence[tuple[Task, Report]],
    counts: Mapping[str, int],
    shards: Mapping[str, Sequence[LocalShard]],
) -> None:
    """Compare what the readers counted with the ledger that was written, file by file.

    :raises DropforgeError: if a row is missing or counted twice.
    """
    tables.view("written", [ledger])
    written: dict[str, int] = dict(tables.all("select file, count(*) from written group by file"))
    twice = tables.one(
        "select count(*) from (select file, position from written group by file, position having count(*) > 1) t"
    )[0]
    read = _records(reports, len(names))
    wrong = [
        f"{name!r} has {rows} rows, the ledger {written.get(name, 0)}"
        for name, rows in zip(names, read, strict=True)
        if written.get(name, 0) != rows
    ]
    wrong += [f"{twice} rows have two ends"] if twice else []
    for split in SPLITS:
        held = sum(shard.rows for shard in shards[split])
        wrong += [f"{split} shards hold {held} rows, the ledger {counts[split]}"] if held != counts[split] else []
    if wrong or counts["input"] != sum(read):
        cause = "; ".join(wrong[:3]) or f"{sum(read)} rows were read, {counts['input']} have an end"
        raise DropforgeError("curation's ledger", f"it does not add up: {cause}", "This is a bug; keep the drop")


def _input(file: DropFile, rows: int) -> dict[str, Any]:
    return {
        "key": file.key,
        "size": file.size,
        "etag": file.etag,
        "version_id": file.version_id,
        "content": file.content,
        "rows": rows,
    }


def _warnings(
    work: Sequence[Task],
    reports: Sequence[tuple[Task, Report]],
    rules: Rules,
    files: Sequence[DropFile],
    hidden: Sequence[str],
    read: Sequence[int],
) -> list[str]:
    """What people should know of their files, beyond the quarantine."""
    told = {f"{task.name}: {warning}": None for task in work for warning in task.split.format.warnings}
    recoded: Counter[str] = Counter()
    for task, report in reports:
        recoded[task.name] += report.recoded
    for name, count in sorted((+recoded).items()):
        told[f"{name}: {count:,} lines are not UTF-8, and were read as {rules.encoding}"] = None
    told |= {f"{file.key}: the file is empty": None for file in files if file.size == 0}
    told |= {f"{file.key}: no rows": None for rows, file in zip(read, files, strict=True) if file.size and not rows}
    told |= {f"{name}: passed over, because a name with a leading `_` or `.` is no data": None for name in hidden}
    return list(told)


def _nothing(drop: Drop, names: Sequence[str], work: Sequence[Task]) -> DataError:
    """No row could be used: say which files, why, and what to do."""
    counts: dict[str, int] = {}
    for task in work:
        for batch in pq.ParquetFile(task.faults).iter_batches(columns=["reason", "detail"]):
            for reason in batch.column("reason").to_pylist():
                counts[reason] = counts.get(reason, 0) + 1
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    thing = f"drop {drop.family}/{drop.drop} ({shown or 'no files'})"
    if not counts:
        return DataError(thing, "its files hold no row", "Upload files with rows, for example JSON lines")
    reasons = sorted((quarantined(counts) | filtered(counts)).items(), key=lambda item: (-item[1], item[0]))
    worst, rows = reasons[0]
    total = sum(counts.values())
    cause = f"none of {total:,} rows can be used; most often the reason is {worst} ({rows:,} rows)"
    cause += "".join(f", then {reason} ({rows:,})" for reason, rows in reasons[1:6])
    return DataError(thing, cause, mend(worst))


def _publish(
    store: Store, drop: Drop, manifest: Manifest, shards: Sequence[LocalShard], out: Path, tell: Progress
) -> Manifest:
    """Upload everything under names made of content, then the manifest; a lost race takes the winner's."""
    prefix = layout.dataset_prefix(drop.family, manifest.digest)
    uploads = {layout.shard_key(drop.family, shard.sha256): shard.path for shard in shards}
    files = {}
    reports = ("ledger.parquet", "quarantine.jsonl", "contamination.jsonl", "card.html", "card.json")
    for name in (name for name in reports if (out / name).is_file()):
        stem, _, kind = name.partition(".")
        key = f"{prefix}{stem}-{file_sha256(out / name)[:16]}.{kind}"
        files[name.replace(".", "_") if stem == "card" else stem] = key
        uploads[key] = out / name
    total = len(uploads) + 1
    for done, (key, path) in enumerate(uploads.items()):
        tell("publish", done, total, 0)
        known = store.stat(key)
        if known is None or known.size != path.stat().st_size:
            store.upload(path, key)
    complete = Manifest(**{**manifest.__dict__, "files": files})
    won = store.put_if_absent(layout.manifest_key(drop.family, manifest.digest), complete.to_json())
    tell("publish", total, total, 0)
    winner = complete if won else find(store, drop.family, manifest.digest)
    return winner or complete


__all__ = ["Rules", "curate", "find"]
