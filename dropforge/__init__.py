"""Dropforge: drop data into S3, get back a fine-tuned, evaluated, registered model."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dropforge.client import Client

__version__ = "0.1.0"
__all__ = ["Client", "__version__"]


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name == "Client":  # what only needs a part, as a rank does, imports no more
            return importlib.import_module("dropforge.client").Client
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
