"""One file per command: parse, call, render. Imported on use, so that `--help` starts at once."""
