"""`python -m ebbflow` is the command `ebbflow`."""

from ebbflow.cli.main import main

if __name__ == "__main__":
    main()
