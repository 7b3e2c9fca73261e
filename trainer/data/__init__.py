"""From a dataset version to batches: rows, tokenizer, documents, packing plan."""
