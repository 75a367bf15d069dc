"""Reductions: rows (softmax, norms) by cooperating threads, columns, softmax and norms along columns, Welford."""
