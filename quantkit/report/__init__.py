"""Reports: one self-contained HTML file per artifact, rendered from its summary alone."""
