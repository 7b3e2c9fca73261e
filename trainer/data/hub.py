"""A base model from the Hugging Face hub: fetched once per node, and each way to fail told by its own word."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from dropforge.errors import DropforgeError, RecipeError

_FILES: Final = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
_SECONDS: Final = 20  # that the hub may take to answer


class UnreachableError(DropforgeError):
    """The hub does not answer. Another try may find it."""


def fetch_from_hub(model: str, revision: str | None, endpoint: str | None = None) -> Path:
    """The folder of a model's files in the cache of this machine; the hub is asked only for what is not there.

    :param endpoint: address of the hub, else the environment's.
    :raises RecipeError: if the hub has no such model or revision, or does not give it to us.
    :raises UnreachableError: if the hub does not answer and the cache does not hold the model.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    name = model if revision is None else f"{model} at {revision}"
    _have_it_end()
    try:
        folder = snapshot_download(
            model,
            revision=revision,
            allow_patterns=list(_FILES),
            ignore_patterns=["*/*"],  # the same weights in other formats
            etag_timeout=_SECONDS,
            endpoint=endpoint,
        )
    except GatedRepoError as error:
        raise _refused(f"the hub gives {name} only to those who accepted its terms", "Accept them") from error
    except RevisionNotFoundError as error:
        raise RecipeError("recipe key `base.revision`", f"the hub has no {name}", "Name a commit or tag") from error
    except RepositoryNotFoundError as error:
        raise _refused(f"the hub has no {name}, or hides it from us", "Check the name") from error
    except HFValidationError as error:
        raise _refused(_short(error), "Name a model as OWNER/NAME, or an address of a folder") from error
    except LocalEntryNotFoundError as error:
        if isinstance(error.__cause__, OfflineModeIsEnabled):
            raise _refused(
                f"{name} is not in the cache, and HF_HUB_OFFLINE forbids to ask for it", "Fill the cache, or unset it"
            ) from error
        raise _unreachable(name, error.__cause__ or error) from error
    except HfHubHTTPError as error:
        if error.response.status_code in (401, 403):
            raise _refused(f"the hub does not give us {name} ({_short(error)})", "Check it") from error
        raise _unreachable(name, error) from error
    except OSError as error:
        raise _unreachable(name, error) from error
    return Path(folder)


def _have_it_end() -> None:
    """Bound the library's requests that have no time limit: a hub that listens and is silent would hold us for ever."""
    from huggingface_hub.utils._http import get_session

    hooks = get_session().event_hooks
    if _bound not in hooks["request"]:
        get_session().event_hooks = {**hooks, "request": [*hooks["request"], _bound]}


def _bound(request: Any) -> None:
    limits = request.extensions.get("timeout") or dict.fromkeys(("connect", "read", "write", "pool"))
    request.extensions["timeout"] = {key: _SECONDS if limit is None else limit for key, limit in limits.items()}


def _refused(cause: str, mend: str) -> RecipeError:
    token = ", and give the pods a token in HF_TOKEN if it is needed" if "hub" in cause else ""
    return RecipeError("recipe key `base.model`", cause, f"{mend}{token}")


def _unreachable(name: str, cause: BaseException) -> UnreachableError:
    return UnreachableError(
        f"base model {name}",
        f"the hub does not answer, and it is not in this machine's cache ({_short(cause)})",
        "See that this machine can reach the hub, or copy the model to S3 and name its address",
    )


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
