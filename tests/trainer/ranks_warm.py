"""What the server of ranks does once for all: transformers compiles a thousand patterns before it loads a model."""

from __future__ import annotations

from contextlib import suppress

with suppress(ImportError):  # not in every version; a rank then does it for itself
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    get_checkpoint_conversion_mapping("llama")
