"""Measurements: one timer, benches of ops, model and serving, traces and their reports."""
