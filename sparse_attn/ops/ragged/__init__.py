"""Ragged lists of what rows attend to, and the plans of a step that they are made by."""
