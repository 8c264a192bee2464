"""Lets `python -m tonnage` do what the command does."""

from tonnage.cli import main

if __name__ == "__main__":
    main()
