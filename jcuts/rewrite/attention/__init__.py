"""Rematerialisation of attention weights in backward passes: equations of an attention, and the algebra of softmax."""
