"""From code to verdict: target -> runs -> traces -> findings -> report."""
