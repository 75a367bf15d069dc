"""cuDNN convolutions: which kernel of which layer an equation is, the custom call that runs it in micro-batches."""
