"""Lowering of loops: a scan and its body as one program with a serial axis over the steps."""
