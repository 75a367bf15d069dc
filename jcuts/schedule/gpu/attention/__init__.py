"""Flash-attention schedules: block tiles of queries and keys, and their cycle model."""
