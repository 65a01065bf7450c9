"""Facts about this process and machine, agreement between ranks, files, logging: what every system uses."""
