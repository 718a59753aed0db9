"""Peers for the bench that go wrong, each in a way of its own; a folder for ``--extra-peers``."""
