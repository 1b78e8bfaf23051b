"""Devices and backends."""

ORDER = 40
