"""One file per command: parse, call, render. Imported on use, so that `quantkit --help` starts at once."""
