"""Tuning results as files that can be checked in: one JSON file per problem, read beside the database."""
