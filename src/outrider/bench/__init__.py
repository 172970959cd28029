"""Measurements: what a machine, a policy or a scheduler does, with the workload that every figure stands on."""
