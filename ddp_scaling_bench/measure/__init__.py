"""Measurement, used by the recorder (``record``) and the built-in training (``train``)."""
