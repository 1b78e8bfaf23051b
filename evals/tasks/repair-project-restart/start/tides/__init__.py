"""Forecasts of water levels."""
