"""Multi-controller programs (`jax.distributed`): one process tunes, all lower the same program."""
