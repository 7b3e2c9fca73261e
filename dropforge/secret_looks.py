"""What looks like a secret by its name or its text: it may be in no manifest, image, recipe or file of settings."""

from __future__ import annotations

import re
from typing import Final

# `token` alone: TOKENIZERS_PARALLELISM and MAX_TOKENS are none.
_NAME: Final = re.compile(
    r"passw|passphrase|pgpass|secret|credential|webhook_url|token(?!i|s)"
    r"|(?:api|access|private|storage|account|ssh|wandb|auth|signing|encryption|master|fernet)_?key",
    re.IGNORECASE,
)
_TEXT: Final = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY|\b(AKIA|ASIA)[A-Z0-9]{16}\b|://[^/\s]*@|\b(ghp|hf|glpat)[_-][A-Za-z0-9]{20,}"
    r"|\bgithub_pat_\w{20,}|\bsk-[\w-]{20,}|\bxox[abeoprs]-[\w-]{10,}|\beyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]{8,}"
)


def looks_secret(name: str, text: str = "") -> bool:
    """Whether a value of this name, or its text, is probably a password, a key or a token."""
    return bool(_NAME.search(name) or _TEXT.search(text))
