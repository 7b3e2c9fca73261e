"""Bodies of the DAGs' tasks, one subject each; the DAG files only wire them."""
