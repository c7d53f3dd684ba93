"""`python -m spo.cli`: the command `spo`."""

from spo.cli.app import main

if __name__ == "__main__":
    main()
