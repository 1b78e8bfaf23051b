"""The grader of the evals. It imports torch and nothing else of this repository."""
