"""The Hugging Face hub: which commit a model's name stands for, and each way to be refused by its own word.

A branch moves. So a run is planned with the commit that it pointed to then: `pin` asks once, and `run.json` has the
answer for every rank and attempt. What that commit holds is fetched by the trainer (`trainer.data.hub`). A token comes
from the environment (`HF_TOKEN`), which the hub's own client reads: none of this ever holds one.

Imports the client inside functions: it is not needed where a base model is none of the hub.
"""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dropforge.errors import DropforgeError, RecipeError
from dropforge.hub_client import LARGEST_ANSWER, SECONDS, StrangeAnswerError, bound_requests, within

CONFIG: Final = "config.json"
WEIGHTS: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"  # of weights in several files

_MIB: Final = 1 << 20
#: Bytes that a file beside the weights may have: it is read as a whole. The largest tokenizers known have about 40 MB,
#: the largest index a few.
LARGEST_INDEX: Final = 64 * _MIB
LARGEST_CONFIG: Final = 8 * _MIB
LARGEST_OTHER: Final = 256 * _MIB
MOST_FILES: Final = 2000  # of a model that are read; each is asked for by itself
_CONFIGS: Final = frozenset(
    {CONFIG, "generation_config.json", "tokenizer_config.json", "adapter_config.json", "chat_template.json"}
    | {"special_tokens_map.json", "added_tokens.json", "preprocessor_config.json", "processor_config.json"}
)
_READ: Final = (".json", ".model", ".txt", ".jinja")

_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_MODEL: Final = "recipe key `base.model`"


@dataclass(frozen=True)
class Asked:
    """What is asked for, in messages. :param key: the recipe's. :param other: where else it could come from."""

    thing: str
    key: str
    revision: str
    other: str


MODEL: Final = Asked(
    "base model",
    "base.model",
    "base.revision",
    "This machine's cache does not hold it. Let it reach the hub, or copy the model to S3 and name its address as "
    "`base.model`",
)
DATA: Final = Asked(
    "data set",
    "data.source.hub",
    "data.source.revision",
    "Let this machine reach the hub, or copy the files into the bucket and name them as `data.source.prefix`",
)
#: What the client raises for JSON, headers and names that are none of a hub.
_STRANGE: Final = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RuntimeError, AssertionError)
_STRANGE_MEND: Final = "See what HF_ENDPOINT names, and what is between it and this machine, such as a proxy"
_BRANCH: Final = "main"
_PICKLES: Final = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_NO_WEIGHTS: Final = ("training_args", "optimizer", "scheduler", "rng_state", "scaler")  # pickles beside a model


class UnreachableError(DropforgeError):
    """The hub does not answer. Another try may find it."""


class StrangeError(UnreachableError):
    """What answers is no hub, or means us ill. Another try may find the hub behind it, but not the next moment."""


@dataclass(frozen=True)
class Pinned:
    """What a model's name and revision stand for. :param commit: 40 hex digits. :param told: where it is known from."""

    commit: str
    told: str


def is_hub_id(model: str) -> bool:
    """Whether a base model is the name of a repository on the Hugging Face hub, not an address of a folder."""
    return not model.startswith(("s3://", "file://", "/", "./", "../")) and not Path(model).is_dir()


def is_commit(revision: str | None) -> bool:
    """Whether a revision is a whole commit hash, which never moves."""
    return revision is not None and _COMMIT.fullmatch(revision) is not None


def pin_base(recipe: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """A recipe's plain values with the commit of its base model in place of a branch, and a line about it.

    :returns: the line is empty for a base model that is none of the hub.
    :raises RecipeError, UnreachableError: as `pin`; and for a folder here whose weights are pickled.
    """
    base = recipe.get("base") or {}
    model = base.get("model")
    if model is None:
        return dict(recipe), ""
    if not is_hub_id(model):
        folder = Path(model.removeprefix("file://"))
        if folder.is_dir():
            check_pickles((path.name for path in folder.iterdir()), model)
            check_folder(folder)
        return dict(recipe), ""
    asked = base.get("revision")
    found = pin(model, asked)
    named = "" if asked == found.commit else f" ({asked or 'its default branch'})"
    line = f"Base model {model}{named} is commit {found.commit}: {found.told}"
    return {**recipe, "base": {**base, "revision": found.commit}}, line


def pin(model: str, revision: str | None = None, endpoint: str | None = None) -> Pinned:
    """The commit of a revision, or of the default branch, whose files the hub would give us now.

    :param endpoint: address of the hub, else the environment's (`HF_ENDPOINT`).
    :raises RecipeError: if the hub has no such model or revision, does not give it to us, or it cannot be trained from.
    :raises UnreachableError: if the hub does not answer, and the cache does not hold the model.
    """
    name = title(model, revision)
    if is_offline():
        folder = cached(model, revision)
        if folder is None:
            raise not_cached(name)
        return Pinned(folder.name, "HF_HUB_OFFLINE is set, and this machine's cache holds it")
    try:
        with asking(name):
            return Pinned(_ask(model, revision, endpoint), "so says the hub")
    except UnreachableError as error:
        folder = cached(model, revision)
        if folder is None:
            raise
        return Pinned(folder.name, f"this machine's cache holds it; {error.cause}")


def _ask(model: str, revision: str | None, endpoint: str | None) -> str:
    from huggingface_hub import HfApi, hf_hub_url

    bound_requests(endpoint)
    api = HfApi(endpoint=endpoint)
    info = api.model_info(model, revision=revision, timeout=SECONDS, files_metadata=True)
    commit = str(info.sha)
    if not is_commit(commit):
        raise OSError(f"it names no commit of {model}, but {commit[:60]!r}")
    check_listing({item.rfilename: item.size for item in info.siblings or ()}, title(model, revision))
    # Who may not have a gated model's files is shown its names all the same.
    api.get_hf_file_metadata(url=hf_hub_url(model, CONFIG, revision=commit, endpoint=endpoint), timeout=SECONDS)
    return commit


def fetch_config(model: str, commit: str) -> Path:
    """The folder in this machine's cache with a commit's `config.json`, which is fetched if it is not there.

    :raises RecipeError, UnreachableError: as `pin`; the latter too if nothing can be written here.
    """
    from huggingface_hub import hf_hub_download

    with asking(title(model, commit), most=LARGEST_CONFIG):
        bound_requests()
        found = Path(hf_hub_download(model, CONFIG, revision=commit, etag_timeout=SECONDS))
        check_place(found, storage(model).parent)
        return found.parent


def at_config(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe's plain values with the folder of its pinned base's config in the place of the base, for an estimate.

    :raises RecipeError, UnreachableError: as `fetch_config`.
    """
    return at_folder(recipe, fetch_config(recipe["base"]["model"], recipe["base"]["revision"]))


def at_folder(recipe: Mapping[str, Any], folder: Path | str) -> dict[str, Any]:
    """A recipe's plain values with a folder here in the place of its base."""
    return {**recipe, "base": {**recipe["base"], "model": str(folder), "revision": None}}


def check_place(path: Path, home: Path) -> None:
    """See that a file of the client's is none of elsewhere, which a link may lead to.

    :param home: the folder that it has to lie in, with what its links name. :raises StrangeAnswerError: otherwise.
    """
    if not path.resolve().is_relative_to(home.resolve()):
        raise StrangeAnswerError(f"its {path.name} became a link out of {home}")


def title(model: str, revision: str | None) -> str:
    """A model with its revision, for messages."""
    return model if revision is None else f"{model} at {revision}"


def is_offline() -> bool:
    """Whether `HF_HUB_OFFLINE` forbids to ask the hub."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def storage(model: str) -> Path:
    """The folder of a model in this machine's cache (`HF_HOME`), whether it is there or not."""
    from huggingface_hub import constants

    # https://huggingface.co/docs/huggingface_hub/guides/manage-cache
    return Path(constants.HF_HUB_CACHE).expanduser() / f"models--{model.replace('/', '--')}"


def cached(model: str, revision: str | None) -> Path | None:
    """The folder of a revision in this machine's cache, named by its commit; None if a file of the model is missing."""
    commit = revision
    if not is_commit(revision):
        try:
            commit = (storage(model) / "refs" / (revision or _BRANCH)).read_text().strip()
        except (OSError, ValueError):
            return None
    if commit is None or not is_commit(commit):
        return None
    folder = storage(model) / "snapshots" / commit
    return folder if is_whole(folder) else None


def is_whole(folder: Path) -> bool:
    """Whether a folder has a config and all files of its weights."""
    if not (folder / CONFIG).is_file():
        return False
    if (folder / WEIGHTS).is_file():
        return True
    try:
        if (folder / INDEX).stat().st_size > LARGEST_INDEX:
            return False
        names = shards((folder / INDEX).read_bytes())
    except (OSError, ValueError):
        return False
    return bool(names) and all((folder / name).is_file() for name in names)


def shards(index: bytes) -> tuple[str, ...]:
    """The files that an index of weights names. :raises ValueError: if it is none, or names a file elsewhere."""
    try:
        found = json.loads(index)
    except RecursionError:
        raise ValueError("its brackets are nested too deep") from None
    weights = found.get("weight_map") if isinstance(found, dict) else None
    named = list(weights.values()) if isinstance(weights, dict) else []
    if not named or not all(isinstance(name, str) and name.endswith(".safetensors") for name in named):
        raise ValueError("it names no safetensors")
    names = sorted(set(named))
    if any("/" in name or "\\" in name for name in names):
        raise ValueError("it names files of another folder")
    return tuple(names)


def check_listing(sizes: Mapping[str, int | None], what: str) -> None:
    """See whether the files that a hub lists are a model that can be fetched within bounds, before any of them is.

    :param sizes: bytes by name, None where the hub tells none. :param what: the model, for messages.
    :raises RecipeError: if they are none. :raises StrangeAnswerError: if no hub lists such.
    """
    for name, size in sizes.items():
        if not (isinstance(name, str) and (size is None or (type(size) is int and size >= 0))):
            raise StrangeAnswerError(f"it lists a file that is none: {str(name)[:60]!r}, of {str(size)[:20]!r} bytes")
    check_files(sizes, what)
    check_sizes(sizes, what)
    read = [name for name in sizes if largest(name) is not None or ("/" not in name and name.endswith(".safetensors"))]
    if len(read) > MOST_FILES:
        cause = f"{what} has {len(read):,} files that are read, and a model may have {MOST_FILES:,} at most"
        raise RecipeError(_MODEL, cause, "Name another model, or save it with fewer and larger files")
    if (untold := next((name for name in sorted(read) if sizes[name] is None), None)) is not None:
        raise StrangeAnswerError(f"it gives no size of {untold[:100]!r}")


def check_files(names: Iterable[str], what: str) -> None:
    """See by their names whether a repository's files are a model that can be loaded without running its code.

    :param what: the model, for messages. :raises RecipeError: otherwise.
    """
    top = {name for name in names if "/" not in name}
    if CONFIG not in top:
        if "adapter_config.json" in top:
            raise RecipeError(_MODEL, f"{what} is an adapter of another model", "Name a model that it is merged into")
        raise RecipeError(_MODEL, f"{what} has no config.json", "Name a model that transformers loads")
    check_pickles(top, what)
    if not top & {WEIGHTS, INDEX}:
        raise RecipeError(_MODEL, f"{what} has no weights in {WEIGHTS}", "Name a model that transformers loads")


def largest(name: str) -> int | None:
    """Bytes that a model's file may have by its name; None for one that is not read as a whole."""
    if "/" in name:
        return None  # nothing of a folder within is read
    if name.endswith(".index.json"):
        return LARGEST_INDEX
    if name in _CONFIGS or name.endswith((".jinja", "README.md")):
        return LARGEST_CONFIG
    return LARGEST_OTHER if name.endswith(_READ) else None


def check_sizes(sizes: Mapping[str, int | None], what: str) -> None:
    """Hold the files beside a model's weights to their bounds, before any of them is fetched or read.

    :param sizes: bytes by name, None where they are not known. :param what: the model, for messages.
    :raises RecipeError: if one is larger.
    """
    for name, size in sorted(sizes.items()):
        most = largest(name)
        if size is not None and most is not None and size > most:
            raise RecipeError(
                _MODEL,
                f"{what}: its {name} has {size:,} bytes, and such a file may have {most:,} at most",
                "Name another model, or one whose file holds no more than the model needs",
            )


def check_folder(folder: Path) -> None:
    """As `check_sizes`, of the files of a folder. :raises RecipeError: also if it holds a pipe or a device."""
    sizes: dict[str, int] = {}
    paths: list[Path] = []
    with suppress(OSError):
        paths += folder.iterdir()
    for path in paths:
        with suppress(OSError):  # what is not there, the reader tells
            facts = path.stat()
            if stat.S_ISREG(facts.st_mode):
                sizes[path.name] = facts.st_size
            elif not stat.S_ISDIR(facts.st_mode):
                cause = f"{folder}: its {path.name[:100]} is a pipe or a device, which has no size"
                raise RecipeError(_MODEL, cause, "Keep plain files in a model's folder")
    check_sizes(sizes, str(folder))


def check_pickles(names: Iterable[str], what: str) -> None:
    """:raises RecipeError: if a model's weights are pickled only: loading them could run whatever they say."""
    found = sorted(names)
    pickles = [name for name in found if name.endswith(_PICKLES) and not name.startswith(_NO_WEIGHTS)]
    if pickles and not any(name.endswith(".safetensors") for name in found):
        raise RecipeError(
            _MODEL,
            f"{what} has its weights as pickles only ({pickles[0]}), and reading a pickle may run what it holds",
            "Save the model with safetensors, which `save_pretrained` writes, or name a revision that has them",
        )


@contextmanager
def asking(name: str, asked: Asked = MODEL, most: int = LARGEST_ANSWER) -> Iterator[None]:
    """Hold the hub's answers to their bounds, and turn what its client raises into our words.

    :param name: of what is asked for, for messages. :param most: bytes of a file that is asked for.
    :raises RecipeError: where another try would end the same way. :raises UnreachableError: where it might not.
    :raises StrangeError: where what answers is no hub.
    """
    from huggingface_hub import errors

    # Errors of the network come from the client's own HTTP library, which changed its name between releases.
    network: Any = errors.HTTPError  # type: ignore[attr-defined]
    try:
        with within(most):
            yield
    except errors.GatedRepoError as error:
        raise _refused(f"the hub gives {name} only to those who accepted its terms", "Accept them", asked) from error
    except errors.RevisionNotFoundError as error:
        raise RecipeError(f"recipe key `{asked.revision}`", f"the hub has no {name}", "Name a commit or tag") from error
    except errors.RepositoryNotFoundError as error:
        raise _refused(f"the hub has no {name}, or hides it from us", "Check the name", asked) from error
    except errors.HFValidationError as error:
        raise _refused(
            _short(error), f"Name a {asked.thing} as OWNER/NAME, or an address of a folder", asked
        ) from error
    except errors.HfHubHTTPError as error:
        if error.response.status_code in (401, 403):
            raise _refused(f"the hub does not give us {name} ({_short(error)})", "Check it", asked) from error
        raise _unreachable(name, error, asked) from error
    except (OSError, network) as error:
        raise _unreachable(name, error.__cause__ or error, asked) from error
    except (StrangeAnswerError, *_STRANGE) as error:
        cause = f"the hub answers what no hub does ({_short(error)})"
        raise StrangeError(f"{asked.thing} {name}", cause, _STRANGE_MEND) from error


def not_cached(name: str) -> RecipeError:
    """The refusal of a machine that may not ask the hub."""
    return _refused(
        f"{name} is not in the cache of this machine, and HF_HUB_OFFLINE forbids to ask for it",
        "Fill the cache, or unset it",
    )


def _refused(cause: str, mend: str, asked: Asked = MODEL) -> RecipeError:
    token = ", and give Airflow and the pods a token in HF_TOKEN if it is needed" if "the hub" in cause else ""
    return RecipeError(f"recipe key `{asked.key}`", cause, f"{mend}{token}")


def _unreachable(name: str, cause: BaseException, asked: Asked) -> UnreachableError:
    return UnreachableError(f"{asked.thing} {name}", f"the hub does not answer ({_short(cause)})", asked.other)


def _short(error: BaseException) -> str:
    """An error in a line. Addresses may carry a signature, which is a right to read a file, or a login."""
    line = re.sub(r"(https?://)[^\s/?'\"]*@", r"\1", " ".join(str(error).split()))
    return re.sub(r"(https?://[^\s?'\"]+)\?[^\s'\"]*", r"\1?...", line)[:200]
