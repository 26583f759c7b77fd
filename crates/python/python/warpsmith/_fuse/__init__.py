"""Fusion: functions and models whose chains of small ops become single kernels."""
