"""The scheduler, the KV block tables and the row cache's accounting, in plain Python without tensors."""
