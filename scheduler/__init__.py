"""Who runs in this step: requests, batches, chunking. Plain Python, no torch."""
