"""The command line `magi2`."""
