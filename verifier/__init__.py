"""From code to verdict: a target is run, its traces are judged, the findings make a report.

It never imports `skill`.
"""
