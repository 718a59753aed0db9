"""Transports: how a tap's bytes cross from a lane to its cells. The contract stands in `base`."""
