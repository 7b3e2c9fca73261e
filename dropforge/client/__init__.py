"""Dropforge from Python: drop data, follow runs, load models. The command line is built on the same parts.

`Client` is where a program begins.
"""

from dropforge.client.airflow import NoSuchRunError
from dropforge.client.client import Client
from dropforge.client.drops import NotTakenError
from dropforge.client.model import Model
from dropforge.client.progress import Stage, View
from dropforge.client.run import Run, RunFailedError, StillRunningError
from dropforge.client.runs import ListedRun
from dropforge.comparison import Comparison
from dropforge.errors import DataError, DropforgeError, RecipeError

__all__ = [
    "Client",
    "Comparison",
    "DataError",
    "DropforgeError",
    "ListedRun",
    "Model",
    "NoSuchRunError",
    "NotTakenError",
    "RecipeError",
    "Run",
    "RunFailedError",
    "Stage",
    "StillRunningError",
    "View",
]
