"""Run jobs with Slurm, on this machine or over ssh, and determine how each run ended."""
