"""The only rooms that know SimPy: instances, transfers, the simulation."""
