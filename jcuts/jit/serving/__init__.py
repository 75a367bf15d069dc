"""Serving: no call waits for tuning (``tune="serve"``), and batches of any size run as buckets of a few sizes."""
