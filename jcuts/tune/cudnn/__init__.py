"""Measures cuDNN convolution algorithms in a child process; fills the tables of `microbatch/`."""
