"""What `compare` reads: which runs are meant, and what MLflow has of them."""
