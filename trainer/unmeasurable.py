"""Why a model has no figures, though nothing is wrong with it."""

from __future__ import annotations

from dropforge.errors import RecipeError


class NoTargetError(RecipeError):
    """A model for which no row has anything to be measured by."""


class OtherTaskError(RecipeError):
    """A model that cannot be measured, because it was made for another task."""
