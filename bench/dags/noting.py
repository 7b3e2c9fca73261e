"""What the three DAGs of `bench.resume` share: each notes when its tasks go on in a worker."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

NAMESPACE = os.environ.get("BENCH_NAMESPACE", "default")
TASKS = range(int(os.environ.get("BENCH_TASKS", "1")))
TOLERATIONS = [{"key": "kwok.x-k8s.io/node", "operator": "Exists"}]
SELECTOR = {"type": "kwok"}


class Noting:
    """In front of an operator: writes DAG, map index and time before anything of the operator's own is done."""

    def resume_execution(self, next_method: str, next_kwargs: dict[str, Any] | None, context: Any) -> Any:
        now, ti = time.time(), context["ti"]
        with Path(os.environ["BENCH_NOTES"]).open("a") as notes:
            notes.write(f"{ti.dag_id} {ti.map_index} {now}\n")
        return super().resume_execution(next_method, next_kwargs, context)  # type: ignore[misc]
