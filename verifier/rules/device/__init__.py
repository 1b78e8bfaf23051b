"""Devices and backends."""
