"""`python -m spo.cli`: the command `spo`."""

from spo.cli.app import main

main()
