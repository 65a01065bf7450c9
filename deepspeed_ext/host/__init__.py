"""Reads facts about this machine and splits a rank's cores. Imports nothing else from the package."""
