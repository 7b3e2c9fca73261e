"""The model: made or loaded, adapted, checked, and written out at the end."""
