"""``python -m shardio``."""

from shardio.cli.main import main

if __name__ == "__main__":
    main()
