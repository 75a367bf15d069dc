"""cuDNN convolutions: matching of equations to cuDNN's layers, and the custom call that runs one in micro-batches."""
