"""A recommender of books."""
