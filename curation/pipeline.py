"""From a drop to a dataset version: fetch, read, settle, write, publish.

Nothing is visible before the manifest, which is written last by a conditional PUT. Whoever comes second with the same
data takes the first one's manifest. A run that was cut off leaves objects that no manifest names, and the next one
writes the same objects again.
"""

from __future__ import annotations

import errno
import json
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from curation import caps, exchange, increments, previous_sides, state
from curation.card import render, summary
from curation.croissant import croissant
from curation.decontaminate import FOUND
from curation.drift import compare, measured
from curation.earlier import before as before_it
from curation.earlier import newest
from curation.engines.choice import choose, opened
from curation.engines.duck import Memory
from curation.engines.tables import Engine
from curation.eval_sets import EvalSets, prepare
from curation.freed import give_back
from curation.gate import check_names, fit
from curation.limit import first, limited
from curation.notes import (
    NoUsableRowError,
    causes,
    faults,
    not_as_meant,
    nothing,
    nowhere,
    of_answers,
    unknown_keys,
    warnings,
)
from curation.own import prepare_own
from curation.places import add_lines
from curation.plan import make_rules, readable, small, tasks
from curation.sample import Told, choose_sample
from curation.schema import Columns, by_format, changes, joined, known, retyped
from curation.settling import planned, settle
from curation.statistics import measure
from curation.streams import DEFAULT_LIMITS, Limits
from curation.task import Report, Rules, Task
from curation.verify import verify
from curation.written import Progress, balance, check_digest, exact, find, keys, publish, records, write
from dropforge import dataset, layout
from dropforge.dataset import SPLITS, Manifest, Shard, Step
from dropforge.drop import Drop, DropFile
from dropforge.errors import FULL, DropforgeError, file_error
from dropforge.recipe import Recipe
from dropforge.store import Store

#: Items of evaluation sets on the card.
_SHOWN: Final = 12
_ALONE: Final = (
    "The sample is curated alone: copies of earlier drops of the family, the sides of their rows and what is forgotten "
    "are ignored"
)


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
    :param progress: called with (stage, done, total, input rows read); stages are fetch and read, in bytes,
        deduplicate, write and publish. `Pace` is one.
    :param memory: what the embedded engine may hold.
    :param engine: one that runs already; else that of the recipe is started and ended.
    :param say: told in a sentence which engine is taken, why, and about how long it takes, and which statement of
        settling took long.
    :param sample: look at about so many rows instead of all, for a version that nobody trains on.
    :raises NoUsableRowError: with a version that shows why, if no row can be used.
    :raises DataError: if an object is not what the drop recorded.
    :raises DropforgeError: if the engine cannot run here, the disk is full, or the ledger does not add up.
    """
    tell = progress or _silent
    running: AbstractContextManager[Engine]
    if engine is None:
        planned = sum(file.size for file in drop.data_files)
        choice = choose(recipe.curation, planned)
        if say is not None:
            say(f"Curation engine {choice.engine}: {choice.why}")
        running = opened(choice, recipe.curation, workdir / "engine", planned, memory)
    else:
        running = nullcontext(engine)
    try:
        return _curate(store, drop, recipe, workdir, tell, limits, running, sample, say or _unsaid)
    except OSError as error:
        if error.errno in FULL:
            if error.filename is not None and not Path(os.fsdecode(error.filename)).is_relative_to(workdir):
                raise file_error(error) from error  # as of the folder that the version goes to
            if error.errno == errno.EFBIG:
                raise file_error(OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(workdir))) from error
            raise DropforgeError(
                f"work folder {workdir}", "the disk is full", "Free space, or choose another folder"
            ) from error
        raise


def _unsaid(sentence: str) -> None:
    """Told to nobody."""


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
    sample: int | None,
    say: Callable[[str], None],
) -> Manifest:
    check_names(recipe)
    if recipe.curation.scope == "drop" and sample is None:
        increments.check_unforgotten(store, drop.family)
    rules, sets, own = prepared(store, recipe, workdir, limits)
    with running as engine:
        desk = Desk(store, engine, recipe, sets, own, workdir, tell, limits, say)
        if rules.scope == "drop" or sample is not None:
            return step(desk, drop, replace(rules, scope="drop"), sample=sample)
        return follow(desk, drop.family, drop, rules, recipe.plain(), say)


def prepared(
    store: Store, recipe: Recipe, workdir: Path, limits: Limits = DEFAULT_LIMITS
) -> tuple[Rules, EvalSets | None, Path | None]:
    """The recipe's rules, the evaluation sets that they name, and where its own kernels are unpacked.

    :raises DropforgeError: if a set, a kernel or a key that the recipe names is not there.
    """
    rules, sets = make_rules(recipe), None
    if (asked := recipe.curation.decontaminate) is not None:
        rules, sets = prepare(store, asked, rules, workdir / "eval-sets", limits)
    own, unpacked = prepare_own(recipe, workdir / "own", store)
    return replace(rules, own=own), sets, unpacked


@dataclass(frozen=True)
class Desk:
    """What curating takes beside the drop and its rules.

    :param sets: evaluation sets that the rules name. :param own: where the user's own kernels are unpacked.
    """

    store: Store
    engine: Engine
    recipe: Recipe
    sets: EvalSets | None
    own: Path | None
    workdir: Path
    tell: Progress = _silent
    limits: Limits = DEFAULT_LIMITS
    say: Callable[[str], None] = _unsaid


def follow(
    desk: Desk,
    family: str,
    drop: Drop | None,
    rules: Rules,
    recipe: Mapping[str, Any],
    say: Callable[[str], None],
    *,
    again: bool = False,
) -> Manifest:
    """Add a drop to the newest version of its family, whoever else does so at the same time.

    The version of a drop that the gate refuses is returned, and is not the newest one.

    :param drop: None to curate the drops again that are there. :param recipe: kept beside the version, for later.
    :param again: all of them, although nothing changed.
    """
    asked = rules.forgotten
    while True:
        head = increments.read_head(desk.store, family)
        plan = increments.plan(desk.store, head, rules, drop, again=again)
        if plan.why:
            say(plan.why)
        made = plan.parent
        # A drop that is added is in none of them.
        kept = sides_to_keep(desk.store, family, plan.rules) if plan.parent is None else []
        older = kept or ([head.manifest] if head is not None and plan.parent is None else [])
        was = {old.drop: old for old in head.manifest.steps} if head is not None and plan.parent is None else {}
        for one in plan.drops:
            last = one is plan.drops[-1]
            # The last card speaks for all drops that are curated again, and so does the log.
            lines = increments.told_anew(desk.store, [*was.values()], made.steps) if last and made is not None else []
            for line in lines:
                say(line)
            made = step(
                desk,
                one,
                plan.rules,
                made,
                repair=again,
                bare=not last,
                kept=kept,
                older=older,
                was=was.get(one.id),
                anew=lines,
            )
        if made is None:
            raise increments.no_family(family)
        if head is not None and plan.parent is None:
            if names := increments.renamed(desk.store, head.manifest, made):
                say(f"{len(names):,} forgotten rows have other keys by now: curating without them")
                rules = replace(rules, forgotten=tuple(sorted({*rules.forgotten, *names})))
                continue
            increments.check_forgotten(desk.store, head.manifest, made, asked)
        if not plan.drops and drop is not None:
            return increments.read(desk.store, family, next(s.digest for s in made.steps if s.drop == drop.id))
        if drop is not None and not fit(made, desk.recipe):
            say("The gate refuses this drop: the family's newest version stays what it is")
            return made
        if increments.move(desk.store, family, head, made, recipe):
            return made
        say("Another drop of the family was faster; this one is deduplicated and split again, behind it")


def sides_to_keep(store: Store, family: str, rules: Rules) -> list[Manifest]:
    """The versions whose sides the rules want to keep, the newest first. :raises DataError: if that one is gone."""
    return increments.and_before(store, increments.read(store, family, rules.sides_of)) if rules.sides_of else []


def step(
    desk: Desk,
    drop: Drop,
    rules: Rules,
    parent: Manifest | None = None,
    *,
    repair: bool = False,
    bare: bool = False,
    sample: int | None = None,
    kept: Sequence[Manifest] = (),
    older: Sequence[Manifest] = (),
    was: Step | None = None,
    anew: Sequence[str] = (),
) -> Manifest:
    """Curate one drop, and add it to a version of its family if there is one.

    :param repair: store what later drops need again, also if the version is there.
    :param bare: the first version may be without a row, as other drops follow.
    :param sample: look at about so many rows instead of all.
    :param kept: versions whose sides are to be kept, the newest first. :param older: those whose forgotten rows are
        known by their places.
    :param was: what the drop was in the version before, where it is curated again. :param anew: what is told of others
        that are.
    :raises NoUsableRowError: if no row of a first drop stays.
    """
    store, tell, workdir = desk.store, desk.tell, desk.workdir
    family = rules.scope == "family"
    earlier = parent.steps if parent else ()
    files, passed = readable(drop, lambda file: small(store, drop, file, workdir / "files"))
    whole = len(files)
    fetched: Callable[[int, int], None] = lambda done, total: tell("fetch", done, total, 0)  # noqa: E731
    files, paths, most, texts = first(store, drop, files, rules, workdir / "files", fetched, desk.limits)
    passed |= dict.fromkeys(texts, "it is plain text beside tables; `data.text_files: read` reads it")
    names = [file.key for file in files]
    held = list(zip(names, paths, strict=True))
    taken = choose_sample(sample, held, rules.max_row_bytes, rules.encoding) if sample else None
    index = desk.sets.path if desk.sets else None
    stood = increments.steps_of(kept, drop.id)
    more: dict[str, Any] = {
        "limits": desk.limits,
        "index": index,
        "sample": taken,
        "most": most,
        "own": desk.own,
        "forgotten": increments.forgotten_places(store, increments.steps_of(older, drop.id)) if rules.forgotten else {},
    }
    work = list(tasks(drop, files, paths, rules, workdir / "parts", **more))
    reports = _read(desk.engine, work, tell)
    if desk.recipe.curation.steps == "none":
        verify(reports)
    # A drop that is forgotten whole makes a version without a row.
    refusal, why = None, causes(work)
    if not work or not (parent or sum(report.records if rules.forgotten else report.rows for _, report in reports)):
        refusal = nothing(drop, names, faults(work), why, passed, nowhere(reports, rules))
    if not sum(report.records for _, report in reports) and refusal is not None:
        raise refusal  # there is nothing to show
    tell("deduplicate", 0, planned(rules).total(), 0)
    give_back()
    before = _before(desk, drop.family, earlier, kept)
    if stood:
        before["old_sides"] = [previous_sides.write(store, stood, names, workdir / "state" / "old_sides.parquet")]
    with desk.engine.tables(workdir / "tables") as tables:
        most_rows = rules.max_rows_per_source
        capped = caps.write(most_rows, workdir / "caps.parquet") if most_rows else None
        exchange.load(tables, work, rules, before, capped)
        sides = {"trained": _any(parent, "train"), "evaluated": _any(parent, "eval")}
        made = settle(
            tables, rules, **sides, tell=lambda done, total: tell("deduplicate", done, total, 0), say=desk.say
        )
        give_back()
        moved = previous_sides.changed(tables, asked=bool(rules.sides_of))
        ends = exchange.counts(tables)
        if refusal is None and not (parent or repair or bare or rules.forgotten or ends["train"] + ends["eval"]):
            gone = {end: rows for end, rows in ends.items() if rows and end != "input"}
            refusal = nothing(drop, names, gone, why)
        counts = increments.sums(parent, ends)
        facts = {**rules.facts(), "exact": exact(tables), **({"sample": sample} if sample else {})}
        facts |= {"drop": drop.id} if family else {}
        facts |= {"parent": parent.digest} if parent else {}
        digest = dataset.digest({split: keys(tables, split) for split in SPLITS}, counts, facts)
        tell("deduplicate", made, made, 0)
        out = workdir / "out" / (drop.id if family else "")
        found = find(store, drop.family, digest)
        if found is not None and not repair:
            return _unless(refusal, store, found, sample)
        old_names = [key for old in earlier for key in old.keys]
        left = state.write(tables, rules, out / "state", len(old_names)) if family else {}
        left = state.as_named(left, found.steps[-1]) if found is not None and left else left
        state.upload(store, drop.family, left, repair=repair)
        if found is not None:
            return found
        shards = write(tables, rules, out, names, old_names, ends, tell)
        give_back()
        balance(tables, out / "ledger.parquet", names, reports, ends, shards)
        check_digest(shards, counts, facts, digest)
        touched = {name: sum(getattr(report, name) for _, report in reports) for name in touchable(rules)}
        counted = _stage_counts(reports)
        touched |= {name: count for name, count in counted.items() if not name.startswith((FOUND, "sample_"))}
        sources = {*rules.prefer, *dict(most_rows), *(desk.recipe.data.mix or {})}
        known_before: Mapping[str, Any] | None = (parent.measured if parent else {}) if family else None
        statistics = measure(tables, names, touched, named=sources, before=known_before)

    read = records(reports, len(files))
    inputs = tuple(_input(file, rows) for file, rows in zip(files, read, strict=True))
    new = [
        Shard(split, layout.shard_key(drop.family, shard.sha256), shard.sha256, shard.rows, shard.bytes)
        for split in SPLITS
        for shard in shards[split]
    ]
    columns = _columns(work, reports)
    manifest = Manifest(
        family=drop.family,
        digest=digest,
        counts=counts,
        rules=facts,
        shards=(*(parent.shards if parent else ()), *new),
        inputs=inputs,
        columns=by_format(columns),
        parent=parent.digest if parent else None,
    )
    # Of a file without a row in the sample nothing is known.
    unread = unknown_keys(reports, rules)
    worth = [*limited(rules, len(files), whole), *not_as_meant(reports, rules, unread)]
    worth += [*increments.emptied(was, ends), *previous_sides.warning(moved), *anew]
    worth += of_answers(statistics.repeated_answers, statistics.examples, statistics.crossing, rules)
    worth += desk.sets.warnings() if desk.sets is not None else []
    of_files = warnings(work, reports, rules, files, passed, [1] * len(files) if sample else read)
    if (override := desk.recipe.curation.gate.override) is not None:
        worth.insert(0, f"The recipe lets this version pass the gate whatever its rules find: {override}")
    told = Told.of(counted) if sample else None
    if told is not None:
        worth[:0] = [told.line(), *([_ALONE] if desk.recipe.curation.scope == "family" else [])]
    card = summary(drop, replace(manifest, counts=ends, shards=tuple(new)), statistics, worth, of_files)  # of the drop
    if told is not None:
        card["sample"] = asdict(told)
    add_lines(card["statistics"], {task.name: task.split for task in work}, desk.limits)
    card["unknown_keys"] = unread
    card["causes"] = [asdict(one) for one in why]
    if desk.sets is not None:
        found_items = desk.sets.report(counted, out / "contamination.jsonl")
        card["evaluation_sets"] = {"sets": desk.sets.summary(counted), "found": found_items[:_SHOWN]}
    if family:
        card["version"] = increments.on_card(manifest, earlier, drop.drop, ends)
    last = None
    if not sample and parent:
        last = before_it(store, parent)
    elif not sample:
        last = newest(store, drop.family, lambda made: fit(made, desk.recipe, before=True))
    card["columns"]["changed"] = changes(columns, known(last.card) if last else None)
    card["columns"]["retyped"] = retyped(columns, known(last.card) if last else None)
    if (drift := compare(card, last)) is not None:
        card["drift"] = drift
    if (terms := desk.recipe.data.license) is not None:
        card["license"] = terms
    manifest = replace(manifest, measured=measured(card, parent))
    card["statistics"].pop("known_groups")  # for later drops alone, and long
    drops = [*(old.name for old in earlier), drop.drop]
    metadata = croissant(manifest, drops, terms, datetime.now(UTC).date())
    (out / "croissant.json").write_text(json.dumps(metadata, indent=1, ensure_ascii=False), encoding="utf-8")
    (out / "card.json").write_text(json.dumps(card, indent=1, sort_keys=True, ensure_ascii=False), encoding="utf-8")
    (out / "card.html").write_text(render(card), encoding="utf-8")

    def complete(stored: Mapping[str, str]) -> Manifest:
        if not family:
            return replace(manifest, files=stored)
        kept: dict[str, tuple[str, ...]] = {name: (path.stem,) for name, path in left.items()}
        if not parent and before:  # the sides that it began with are a part of what later drops start from
            kept["colours"] = (*(path.stem for path in before["colours"]), *kept["colours"])
        this = Step(drop.id, drop.drop, drop.prefix, digest, ends, tuple(names), stored, kept)
        return replace(manifest, files=stored, steps=(*earlier, this))

    parts = [one for split in SPLITS for one in shards[split]]
    return _unless(refusal, store, publish(store, drop.family, digest, parts, out, tell, complete), sample)


def _unless(refusal: NoUsableRowError | None, store: Store, manifest: Manifest, sample: int | None) -> Manifest:
    """A version, unless no row of it can be used; then it shows why.

    :param sample: of how many rows, whose card stays nowhere.

    :raises NoUsableRowError: with the version.
    """
    if refusal is None:
        return manifest
    card = "" if sample else f". The card is {store.uri}/{manifest.files['card_html']}"
    told = NoUsableRowError(refusal.thing, f"{refusal.cause}{card}", refusal.mend)
    told.manifest = manifest
    raise told


def _any(parent: Manifest | None, split: str) -> bool:
    return parent is not None and parent.counts.get(split, 0) > 0


def _before(desk: Desk, family: str, earlier: Sequence[Step], kept: Sequence[Manifest]) -> dict[str, list[Path]]:
    """What earlier drops left; for the first one the sides that are to be kept, if some are."""
    steps = earlier
    if kept and not earlier:
        steps = [replace(old, state={"colours": old.state["colours"]}) for old in kept[0].steps]
    return state.fetch(desk.store, family, steps, desk.workdir / "state")


def touchable(rules: Rules) -> tuple[str, ...]:
    """The kernel's counters that the card shows."""
    return ("blank", "neutralised", "invisible", *(["short"] if rules.near else []), *(["masked"] if rules.pii else []))


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


def _columns(work: Sequence[Task], reports: Sequence[tuple[Task, Report]]) -> list[tuple[str, str, Columns]]:
    """Of each file its name, its format, and how many rows have which columns."""
    parts: dict[int, list[Columns]] = {}
    for task, report in reports:
        parts.setdefault(task.file, []).append(report.columns)
    files = {task.file: (task.name, task.split.format.kind) for task in work}
    return [(*files[number], joined(parts[number])) for number in sorted(parts)]


def _stage_counts(reports: Sequence[tuple[Task, Report]]) -> dict[str, int]:
    """What the stages counted, over all splits."""
    counts: Counter[str] = Counter()
    for _, report in reports:
        counts.update(report.counts)
    return dict(sorted(counts.items()))


def _input(file: DropFile, rows: int) -> dict[str, Any]:
    return {
        "key": file.key,
        "size": file.size,
        "etag": file.etag,
        "version_id": file.version_id,
        "content": file.content,
        "rows": rows,
    }


__all__ = ["Progress", "Rules", "curate", "find"]
