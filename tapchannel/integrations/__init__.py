"""Adapters: taps of a trainer's pipeline, attached in a few lines. Each is thin over `session`."""
