"""`python -m quantkit`."""

from quantkit.cli import main

main()
