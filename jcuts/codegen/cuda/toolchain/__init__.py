"""From PTX to a loadable image: ptxas, cubin resources, programmatic dependent launch, packed launches.

In: PTX text of one or more kernels.  Out: a cubin with its launches (`image.Image`).  No GPU is needed.
"""
