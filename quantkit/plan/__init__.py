"""Planning: what a model needs on cards, and which meshes fit, from a config or from headers; torch is never loaded."""
