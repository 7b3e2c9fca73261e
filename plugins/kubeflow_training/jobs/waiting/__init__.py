"""Waiting for a job wherever it runs: its log shown, its state told, its limits kept."""
