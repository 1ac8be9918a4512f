"""Housekeeping: what is done beside the loop so that the disk does not fill."""
