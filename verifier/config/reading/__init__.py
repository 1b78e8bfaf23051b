"""Files that people write, read strictly: every error at once, with its line, its column and what
to write instead.
"""
