"""Scan kernels (cumsum, cummax, ...): along rows by cooperating threads, along columns one thread each."""
