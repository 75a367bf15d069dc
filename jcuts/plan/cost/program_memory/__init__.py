"""Memory of a compiled program, predicted from its jaxpr: buffers after fusion, their order, their heap."""
