"""`python healthy.py PART`: whether Airflow says of one of its parts that it is healthy.

PART is metadatabase, scheduler, triggerer or dag_processor. Airflow's own `jobs check` imports it for seconds each time.
"""

import json
import os
import sys
import urllib.request

part = sys.argv[1]
with urllib.request.urlopen(f"{os.environ['DROPFORGE_AIRFLOW_URL']}/api/v2/monitor/health", timeout=5) as answer:
    found = json.load(answer)[part]
print(json.dumps(found))
sys.exit(found["status"] != "healthy")
