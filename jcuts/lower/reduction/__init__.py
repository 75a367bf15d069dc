"""Lowering of reductions to kernel programs: rows, columns beside them or beside a product, one-pass statistics."""
