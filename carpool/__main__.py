"""`python -m carpool`: the command `carpool`, also where no script of that name is installed."""

from carpool.cli import main

if __name__ == "__main__":
    main()
